"""`titan-tts serve`: a model over HTTP, by the API that OpenAI's clients speak."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tts.serving.options import ServerOptions, check_server_options
from torchtitan.models.dit_tts.errors import InputError, check_range, require_modules, show

if TYPE_CHECKING:
    import uvicorn

KEY_VARIABLE = "TITAN_TTS_API_KEY"

GRACE_SECONDS = 20
"""that answers in progress may take once the server is to end; a client may never read its own"""


@dataclass(kw_only=True)
class Options(ServerOptions):
    """Serve a model over HTTP: POST /v1/audio/speech as OpenAI's clients send it, GET /v1/models, /health.

    A key that requests must have is taken from the environment variable TITAN_TTS_API_KEY.
    """

    max_batch: int = 16
    """Texts per batch."""


def run(options: Options) -> int:
    check_server_options(options)
    check_range("--max-batch", options.max_batch, 1, 4096)
    require_modules("fastapi", "uvicorn", "soundfile")
    listening = listen(options.host, options.port)

    from titan_tts.serving.app import SpeechService, build_app
    from titan_tts.serving.batcher import Batcher
    from titan_tts.serving.served import load_served

    served = load_served(options)
    batcher = Batcher(served.synthesizer, options.max_batch, seed=options.seed)
    name, key = Path(options.run).resolve().name, os.environ.get(KEY_VARIABLE, "")
    service = SpeechService(served, batcher, name)
    port = listening.getsockname()[1]
    listening.listen()  # clients may connect once the line is printed
    show(f"{name} at http://{options.host}:{port}/v1, {'with' if key else 'without'} a key")
    try:
        server(build_app(service, key, options.host)).run([listening])
    finally:
        batcher.close()
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address. Raises InputError if it is taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InputError(
            f"--host = {host}, --port = {port}: nothing can listen there ({error.strerror}); give another port, or "
            f"--port 0 for a free one"
        ) from None
    return listening


def server(app: Any) -> "uvicorn.Server":
    """The web server of an application."""
    import uvicorn

    limits: Any = {"timeout_keep_alive": 60, "timeout_graceful_shutdown": GRACE_SECONDS}
    return uvicorn.Server(uvicorn.Config(app, ws="none", log_level="warning", **limits))
