"""`titan-tts serve`: a model over HTTP, by the API that OpenAI's clients speak."""

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from titan_tts.speak.sampling_options import SamplingOptions, load_synthesizer
from torchtitan.models.dit_tts.errors import (
    InputError,
    check_range,
    require,
    require_modules,
    show,
)

if TYPE_CHECKING:
    import uvicorn

KEY_VARIABLE = "TITAN_TTS_API_KEY"

GRACE_SECONDS = 20
"""that answers in progress may take once the server is to end; a client may never read its own"""

STALL_SECONDS = 60
"""after which a connection is closed that takes nothing of what is sent: as an idle one, and a pause of a player is shorter"""


@dataclass(kw_only=True)
class Options(SamplingOptions):
    """Serve a model over HTTP: POST /v1/audio/speech as OpenAI's clients send it, /dev/captioned_speech with the words'
    times, a WebSocket at /v1/audio/speech/stream, GET /v1/models, /health; and a page to type a text and hear it.

    A key that requests must have is taken from the environment variable TITAN_TTS_API_KEY.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 also serves other machines."""

    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""

    voice: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """NAME=FILE: a voice from a recording, in addition to the speakers (NAME=FILE,FILE: from one of each turn's
    speaker); NAME=FOLDER or NAME=FOLDER,FILE: with an adapter that `titan-tts export --adapter` wrote; may be
    repeated."""

    allow_origin: str = ""
    """Origin, such as https://example.org, whose pages may call this server from a browser; *: any; empty: none but
    its own."""

    max_characters: int = 4096
    """Longest text of a request."""

    max_seconds: float = 1200.0
    """Longest speech of a request, as estimated: 4096 letters at a quarter of the speed take about as long."""

    max_batch: int = 16
    """Texts per batch."""


def run(options: Options) -> int:
    check_range("--port", options.port, 0, 2**16 - 1)
    check_range("--max-characters", options.max_characters, 1, 10**6)
    check_range("--max-seconds", options.max_seconds, 1, 10**6)
    check_range("--max-batch", options.max_batch, 1, 4096)
    require(
        re.fullmatch(r"(\*|https?://[^/]+)?", options.allow_origin) is not None,
        f"--allow-origin = {options.allow_origin}, but it must be as https://example.org, without a path, or *",
    )
    given = given_voices(options)
    require_modules("fastapi", "uvicorn", "websockets", "soundfile", "soxr")
    listening = listen(options.host, options.port)
    # Read by torch and oneDNN on a CPU, which keep bfloat16's kernels of 1,024 shapes: 6 MB for each new length of speech.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

    from titan_tts.serving.app import SpeechService, build_app
    from titan_tts.serving.batcher import Batcher

    synthesizer = load_synthesizer(options)
    synthesizer.show_default_voice("a request")
    _ = synthesizer.lengths  # a missing predictor or fit is told now, not at the first request
    voices = {
        name: synthesizer.adapted(name, folder, files) if folder else synthesizer.recording(files)
        for name, (folder, files) in given.items()
    }
    batcher = Batcher(synthesizer, options.max_batch, seed=options.seed)
    name, key = Path(options.run).resolve().name, os.environ.get(KEY_VARIABLE, "")
    limits = options.max_characters, options.max_seconds
    service = SpeechService(synthesizer, batcher, name, voices, *limits)
    port = listening.getsockname()[1]
    listening.listen()  # clients may connect once the line is printed
    show(f"{name} at http://{options.host}:{port}/v1, {'with' if key else 'without'} a key")
    app = build_app(service, key, options.host, options.allow_origin)
    try:
        server(app, service.body_limit).run([listening])
    finally:
        batcher.close()
    return 0


def given_voices(options: Options) -> dict[str, tuple[str, list[str]]]:
    """(folder of an adapter, recordings) of each --voice by its name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for given in options.voice:
        name, _, path = given.partition("=")
        require(bool(name and path), f"--voice = {given}, but it must be NAME=FILE")
        require(name not in found, f"--voice = {given}, but {name} is given twice")
        files = [path] if os.path.exists(path) else path.split(",")
        folder = files.pop(0) if os.path.isdir(files[0]) else ""
        exist = all(map(os.path.isfile, files))
        require(exist, f"--voice = {given}, but there is no such file")
        found[name] = folder, files
    return found


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address. Raises InputError if it is taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * STALL_SECONDS)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InputError(
            f"--host = {host}, --port = {port}: nothing can listen there ({error.strerror}); give another port, or "
            f"--port 0 for a free one"
        ) from None
    return listening


def server(app: Any, body_limit: int = 2**20) -> "uvicorn.Server":
    """The web server of an application. `body_limit`: most bytes of a WebSocket's message."""
    import uvicorn

    limits: Any = {
        "ws_max_size": body_limit,
        "timeout_keep_alive": STALL_SECONDS,
        "timeout_graceful_shutdown": GRACE_SECONDS,
    }
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", **limits))
