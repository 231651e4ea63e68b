"""The overlay: our modules and upstream's as one package `torchtitan`, importable from any folder.

In a checkout `torchtitan/__init__.py` does that. A wheel cannot ship this file, since it would overwrite
upstream's, and upstream's own needs triton; so the command builds the package object itself.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType


def install_overlay(upstream: bool = True) -> None:
    """Makes `torchtitan` importable from any folder, our modules first, without upstream's `__init__`. `upstream`: ends the
    program where upstream is not installed; False: our own modules are enough."""
    if "torchtitan" in sys.modules:
        return
    here = Path(__file__).resolve().parents[1]
    folders = [str(here / "torchtitan")]
    for entry in sys.path:
        folder = str(Path(entry).resolve() / "torchtitan")
        if Path(folder, "train.py").is_file() and folder not in folders:
            folders.append(folder)
    has_upstream = any(Path(folder, "train.py").is_file() for folder in folders)
    if upstream and not has_upstream:
        sys.exit("error: torchtitan is not installed; run: pip install torchtitan==0.2.2")
    package = ModuleType("torchtitan", "TorchTitan and our modules.")
    package.__path__ = folders
    package.__spec__ = ModuleSpec("torchtitan", None, is_package=True)
    package.__spec__.submodule_search_locations = folders
    sys.modules["torchtitan"] = package
    if not has_upstream:
        return
    vars(package)["__version__"] = version("torchtitan")

    from torchtitan import _imports, models

    # Upstream's `models` package does not look into other folders.
    families = [str(Path(folder, "models")) for folder in folders]
    models.__path__ = list(dict.fromkeys([*models.__path__, *families]))

    _imports.adapt_imports()
    # Our `models/__init__.py`, which lists our family, is not in a wheel.
    if "_supported_models" in vars(models):
        models._supported_models |= {"dit_tts"}


def call_in_overlay(target: str, *args: object) -> object:
    """Calls "module:function" in a process that may have started without our modules: spawned and Ray's processes
    import functions by name, and can always import this one."""
    install_overlay()
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*args)
