"""The console command `titan-tts`, and `from_pretrained` for Python."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tts.overlay import install_overlay

if TYPE_CHECKING:
    from titan_tts.speak.synthesizer import Synthesizer


def from_pretrained(name: "str | Path" = "titan_tts:base", **options: Any) -> "Synthesizer":
    """A trained model to speak with; see `titan_tts.speak.sampling_options.from_pretrained` for the
    options. `name`: a folder that `titan-tts export` wrote, a run's folder, OWNER/NAME on the
    Hugging Face hub, or titan_tts:NAME, which comes with the package.
    """
    install_overlay()
    from titan_tts.speak.sampling_options import from_pretrained

    return from_pretrained(name, **options)


def main() -> None:
    install_overlay()
    from titan_tts.cli import main as cli_main

    status = cli_main(sys.argv[1:])
    if "triton" not in sys.modules:  # whose bindings name all that is never looked through
        gc.freeze()  # else the interpreter's end looks through all of torch once more: 0.4 s
    sys.exit(status)
