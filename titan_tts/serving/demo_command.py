"""`titan-tts demo`: a page to type a text and hear it."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from titan_tts.serving.options import ServerOptions, check_server_options
from torchtitan.models.dit_tts.errors import InputError, require_modules, show


@dataclass(kw_only=True)
class Options(ServerOptions):
    """Open a page to type a text, choose or record a voice, and hear and see what the model says."""


def run(options: Options) -> int:
    check_server_options(options)
    require_modules("gradio", "soundfile", "matplotlib")
    from titan_tts.launch.supervisor import interrupt_on_signals

    interrupt_on_signals()  # so that the folder is removed
    # Gradio's default is one folder for all users of a machine, which belongs to the first of them.
    with tempfile.TemporaryDirectory(prefix="titan-tts-demo-") as folder:
        os.environ.setdefault("GRADIO_TEMP_DIR", folder)
        _serve(options)
    return 0


def _serve(options: Options) -> None:
    from starlette.middleware import Middleware

    from titan_tts.serving.page import build_page
    from titan_tts.serving.refusals import HostCheck
    from titan_tts.serving.served import load_served

    page = build_page(load_served(options), Path(options.run).resolve().name, options.seed)
    try:
        _, address, _ = page.launch(
            server_name=options.host,
            server_port=options.port or None,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            app_kwargs={"middleware": [Middleware(HostCheck, host=options.host)]},
        )
    except OSError as error:
        raise InputError(
            f"--host = {options.host}, --port = {options.port}: {error}; give another port"
        ) from None
    try:
        show(f"the page is at {address}")
        page.block_thread()
    finally:
        page.close(verbose=False)
