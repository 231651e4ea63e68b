"""The console command `titan-tts`: lays our tree over the installed torchtitan, then runs.

In a checkout the overlay is `torchtitan/__init__.py`. A wheel cannot ship that file, since it would
overwrite upstream's, and upstream's own needs triton; so the command makes the package itself.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def lay_overlay() -> None:
    """Makes `torchtitan` importable from any folder, ours first, without upstream's `__init__`."""
    if "torchtitan" in sys.modules:
        return
    here = Path(__file__).resolve().parent
    folders = [str(here / "torchtitan")]
    for entry in sys.path:
        folder = str(Path(entry).resolve() / "torchtitan")
        if Path(folder, "train.py").is_file() and folder not in folders:
            folders.append(folder)
    if not any(Path(folder, "train.py").is_file() for folder in folders):
        sys.exit("error: torchtitan is not installed; run: pip install torchtitan==0.2.2")
    package = ModuleType("torchtitan", "TorchTitan with our tree over it.")
    package.__path__ = folders
    package.__spec__ = importlib.util.spec_from_loader("torchtitan", None, is_package=True)
    package.__spec__.submodule_search_locations = folders
    sys.modules["torchtitan"] = package

    from importlib.metadata import version

    package.__version__ = version("torchtitan")

    from torchtitan import _cpu, models

    # Upstream's `models` is a package of its own, which does not look into another folder.
    families = [str(Path(folder, "models")) for folder in folders]
    models.__path__ = list(dict.fromkeys([*models.__path__, *families]))

    _cpu.use_cpu_without_accelerator()
    # A wheel is without our `models/__init__.py`, which lists our family.
    if "_supported_models" in vars(models):
        models._supported_models |= {"dit_tts"}


def call_overlaid(target: str, *args: object) -> object:
    """Calls "module:function" in a process that may have started without the overlay.

    Spawned processes and Ray's import what they are sent by name, and this module they can import.
    """
    lay_overlay()
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def main() -> None:
    lay_overlay()
    from torchtitan.models.dit_tts.cli import main as cli_main

    sys.exit(cli_main(sys.argv[1:]))


if __name__ == "__main__":  # torchrun -m titan_tts train ...
    main()
