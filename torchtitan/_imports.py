"""Faster imports of some modules of upstream and of transformers, which also work with a CPU as the device.

Upstream imports at once what most runs never use: HF datasets for its validator, Inductor for a name in an
annotation, TensorBoard, torch for the config. That is 40 % of a start. Here such a module is imported
when the first of its names is used. The modules are upstream's own files, of torchtitan 0.2.2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torchtitan import _cpu

_LATE = {
    "torchtitan.components.metrics": "torch.utils.tensorboard",
    "torchtitan.components.validate": "torchtitan.hf_datasets.text_datasets",
    "torchtitan.config.job_config": "torch",
    "torchtitan.protocols.model": "torchtitan.models.attention",
    "torchtitan.protocols.train_spec": "torch.distributed.pipelining.schedules",
    # phonemizer needs it for parallel jobs alone.
    "phonemizer.backend.base": "joblib",
    # Every model of transformers imports both, for losses and weights that no text encoder has.
    "transformers.loss.loss_utils": "scipy.optimize",
    "transformers.quantizers.quantizer_torchao": "torchao.prototype.safetensors.safetensors_support",
}
"""Modules, and what each of them imports for a name that it calls or annotates with"""

_Execute = Callable[[ModuleType], None]


class _LateName:
    """A name of a module that is imported when the name is called."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*args, **kwargs)

    def __ror__(self, other: Any) -> Any:
        return other  # one kind less in an annotation, which nobody evaluates

    __or__ = __ror__


def _with_getattr(module: ModuleType, get: Callable[[str], Any]) -> ModuleType:
    """The module, in which `get` finds missing names."""

    def find(name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for them
            raise AttributeError(name)
        return get(name)

    vars(module)["__getattr__"] = find
    return module


def _import_late(execute: _Execute, module: ModuleType) -> None:
    """Executes a module whose entry in `_LATE` is not imported with it."""
    late = _LATE[module.__name__]
    if late in sys.modules:
        return execute(module)
    sys.modules[late] = _with_getattr(ModuleType(late), lambda name: _LateName(late, name))
    try:
        execute(module)
    finally:
        del sys.modules[late]


def _execute_late(execute: _Execute, module: ModuleType) -> None:
    """Executes a package when the first of its names is used, while its submodules can be imported."""

    def load(name: str) -> Any:
        del vars(module)["__getattr__"]
        execute(module)
        return getattr(module, name)

    _with_getattr(module, load)


def _after_varlen(execute: _Execute, module: ModuleType) -> None:
    """Executes a module next to which the operator of variable-length attention is named, as upstream's tests
    and families do: upstream has it registered by any import of its package."""
    import_module("torch.nn.attention.varlen")
    execute(module)


def _choose_device(execute: _Execute, module: ModuleType) -> None:
    execute(module)
    _cpu.use_cpu_without_accelerator(module)


_IMPORTS = {
    **dict.fromkeys(_LATE, _import_late),
    "torchtitan.config": _execute_late,  # a table of torch's dtypes stands in it
    "torchtitan.distributed": _execute_late,
    "torchtitan.distributed.activation_checkpoint": _after_varlen,  # every family imports it
    "torchtitan.protocols": _execute_late,
    "torchtitan.tools.utils": _choose_device,
}


class _Finder(MetaPathFinder):
    """Finds the modules of `_IMPORTS` where they are, and has them executed as it says."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        how = _IMPORTS.get(fullname)
        spec = PathFinder.find_spec(fullname, path) if how is not None else None
        if how is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: how(execute, module)  # type: ignore[method-assign]
        return spec


def adapt_imports() -> None:
    """Has these modules imported as this module says, from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
