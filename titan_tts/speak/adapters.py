"""Adapters ([lora] of a run's config): read from a run's checkpoint or from an exported folder, and added to the
weights that they are for.

    adapter.safetensors    its parameters under the run's names
    adapter.json           format, version, its [lora] section, the base that it is for, step and weights
    manifest.json          size and XXH3 of both

Beside them lie the files of `peft_adapters.py`, for other programs.
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_tts.speak import peft_adapters
from torchtitan.models.dit_tts.bounded import read_json_file, read_weights
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.config.keys import check_numbers
from torchtitan.models.dit_tts.config.manager import config_from_dict
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.files import save_weights, write_atomic
from torchtitan.models.dit_tts.infra.adapters import adapter_shapes, is_trained, merge
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights
from torchtitan.models.dit_tts.run.manifest import MANIFEST, verify_files, write_manifest
from torchtitan.models.dit_tts.run.resume_rules import adapter_base

CONFIG, WEIGHTS = "adapter.json", "adapter.safetensors"
_FORMAT, _VERSION = "titan-tts adapter", 1

Values = dict[str, torch.Tensor]
"""Parameters of an adapter by name"""


def read_tensors(state: dict[str, Any], path: Path) -> None:
    """Reads a checkpoint's tensors into those of `state`, in one process."""
    from torchtitan.models.dit_tts.run.checkpoint_storage import load_checkpoint

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_checkpoint(state, path, no_dist=True)


def read_adapter(path: Path, entry: str = "") -> Values:
    """The adapter in a run's checkpoint, behind the prefix `entry` of the weights."""
    from torchtitan.models.dit_tts.run.checkpoint_storage import read_table

    table: dict[str, Any] = read_table(path).state_dict_metadata
    names = [name.removeprefix(entry) for name in table if name.startswith(entry)]
    trained = [name for name in names if is_trained(name) and not name.startswith("ema.")]
    found = {entry + name: torch.empty(table[entry + name].size) for name in trained}
    read_tensors(found, path)
    return {name: found[entry + name] for name in trained}


def write_adapter(
    folder: Path, options: Lora, values: Values, base: Path, about: dict, model: nn.Module
) -> None:
    """Writes an adapter's folder. `base`: the weights that it is for; `about`: further entries of adapter.json; `model`:
    one of the base's layers, whatever its weights."""
    save_weights({name: value.contiguous() for name, value in values.items()}, folder / WEIGHTS)
    content = {"format": _FORMAT, "version": _VERSION, "lora": asdict(options)}
    content |= adapter_base(base) | about
    write_atomic(folder / CONFIG, json.dumps(content, indent=1) + "\n")
    peft_adapters.write_peft(folder, options, values, model, base.name)
    files = CONFIG, WEIGHTS, peft_adapters.CONFIG, peft_adapters.WEIGHTS
    write_manifest(folder, files, {})


def open_adapter(folder: Path, base: Path) -> tuple[Lora, Values]:
    """An adapter that `titan-tts export --adapter` wrote for the exported folder `base`."""
    path, again = folder / CONFIG, "export the adapter again"
    for name in (CONFIG, WEIGHTS, MANIFEST):
        has_it = f"{folder} is not an adapter of titan-tts export --adapter: it has no file {name}; {again}"
        require((folder / name).is_file(), has_it)
    with reading(path, again):
        content = read_json_file(path)
        known, given = (content["format"], content["version"]), content["lora"]
    require(known == (_FORMAT, _VERSION), f"{path} is not of version {_VERSION}; {again}")
    if problem := verify_files(folder, needed=(CONFIG, WEIGHTS)):
        raise InputError(f"{problem}; copy the adapter again, or {again}")
    options = config_from_dict({"lora": given}, str(path)).lora
    check_numbers(options, "lora")
    require(options.rank > 0, f"{path}: rank = 0; {again}")
    require(
        all(content.get(key) == value for key, value in adapter_base(base).items()),
        f"{folder} is an adapter of other weights than {base}; give the exported folder that it was trained over",
    )
    with reading(folder / WEIGHTS, again):
        return options, read_weights(folder / WEIGHTS)[0]


def add_adapter_to(model: nn.Module, options: Lora, values: Values) -> None:
    """Raises InputError where names or shapes are not the model's, or what comes out is not finite."""
    wanted = adapter_shapes(model, options.rank)
    for name in sorted(wanted.keys() | values.keys()):
        found = tuple(values[name].shape) if name in values else "missing"
        needed = wanted.get(name, "not there")
        require(
            found == needed,
            f"the adapter does not fit the model: {name} is {found}, but of rank {options.rank} it is {needed}",
        )
    merge(model, values, options.alpha / options.rank)
    finite = all(each.weight.isfinite().all() for each in matmul_weights(model))
    require(finite, "the adapter makes weights of the model infinite; export the adapter again")


class Adapters:
    """Adapters of one model by name, of which it has one at a time or none. Only the values of its weights change, so
    compiled blocks and recorded CUDA graphs stay. The decoder's plain projections are kept in a second copy."""

    def __init__(self, model: nn.Module, base: Path):
        self._model, self._base = model, base
        self._opened: dict[str, tuple[Lora, Values]] = {}
        self._plain: dict[nn.Linear, torch.Tensor] = {}
        self._present: str | None = ""  # None: the weights of no whole adapter

    def open(self, name: str, folder: Path) -> None:
        """Reads an adapter, ours or one that PEFT saved, in place of one of this name."""
        of_peft = (folder / peft_adapters.CONFIG).is_file() and not (folder / CONFIG).exists()
        opened = (
            peft_adapters.read_peft(folder, self._model)
            if of_peft
            else open_adapter(folder, self._base)
        )
        self.use("")
        if not self._plain:
            linears = matmul_weights(self._model)
            self._plain = {each: each.weight.detach().clone() for each in linears}
        self._present = None
        add_adapter_to(self._model, *opened)
        self._opened[name], self._present = opened, name

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Gives the model this adapter; an empty name: none."""
        if name == self._present:
            return
        self._present = None
        for linear, weight in self._plain.items():
            linear.weight.copy_(weight)
        if name:
            options, values = self._opened[name]
            merge(self._model, values, options.alpha / options.rank)
        self._present = name
