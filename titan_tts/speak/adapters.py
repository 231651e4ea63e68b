"""Adapters ([lora] of a run's config): read from a run's checkpoint or from an exported folder, and added to the
weights that they are for.

An exported adapter is one of Hugging Face's PEFT, with two files more:

    adapter_config.json          rank, alpha, and the layers by a regular expression
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight (rank, in) and .lora_B.weight (out, rank)
    adapter.json                 format, version, the base that it is for, step and weights
    manifest.json                size and XXH3 of the others

PEFT has one update for each layer. Layers of fused matrices fit: `whole_updates` of `infra/adapters.py`.
"""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.models.dit_tts.bounded import read_json_file, read_weights
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.files import save_weights, write_atomic
from torchtitan.models.dit_tts.infra.adapters import (
    adapter_shapes,
    is_trained,
    merge,
    whole_updates,
)
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights
from torchtitan.models.dit_tts.run.manifest import MANIFEST, verify_files, write_manifest
from torchtitan.models.dit_tts.run.resume_rules import adapter_base

CONFIG = "adapter.json"
_FORMAT, _VERSION = "titan-tts adapter", 1
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight")

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base's weights
    "bias": ("none",),
}
"""Values of settings under which an update is scale · B A, and nothing else is changed"""

Values = dict[str, torch.Tensor]
"""Parameters of a run's adapter by name"""

Updates = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> A (rank, in) and B (out, rank): B A is added to its weight"""


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
    content = {"format": _FORMAT, "version": _VERSION} | adapter_base(base) | about
    write_atomic(folder / CONFIG, json.dumps(content, indent=1) + "\n")
    write_peft(folder, options, values, model, base.name)
    write_manifest(folder, (CONFIG, PEFT_CONFIG, PEFT_WEIGHTS), {})


def check_exported(folder: Path, base: Path) -> None:
    """Raises InputError where a folder of `titan-tts export --adapter` has changed, or is for other weights than those of
    the exported folder `base`."""
    path, again = folder / CONFIG, "export the adapter again"
    for name in (CONFIG, MANIFEST):
        require((folder / name).is_file(), f"{folder}: has no file {name}; {again}")
    with reading(path, again):
        content = read_json_file(path)
        known = content["format"], content["version"]
    require(known == (_FORMAT, _VERSION), f"{path} is not of version {_VERSION}; {again}")
    if problem := verify_files(folder, needed=(CONFIG, PEFT_CONFIG, PEFT_WEIGHTS)):
        raise InputError(f"{problem}; copy the adapter again, or {again}")
    require(
        all(content.get(key) == value for key, value in adapter_base(base).items()),
        f"{folder} is an adapter of other weights than {base}; give the exported folder that it was trained over",
    )


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
    _check_finite(model)


def _check_finite(model: nn.Module) -> None:
    finite = all(each.weight.isfinite().all() for each in matmul_weights(model))
    require(finite, "the adapter makes weights of the model infinite; export the adapter again")


class Adapters:
    """Adapters of one model by name, of which it has one at a time or none. Only the values of its weights change, so
    compiled blocks and recorded CUDA graphs stay. The decoder's plain projections are kept in a second copy."""

    def __init__(self, model: nn.Module, base: Path):
        self._model, self._base = model, base
        self._opened: dict[str, Updates] = {}
        self._plain: dict[nn.Linear, torch.Tensor] = {}
        self._present: str | None = ""  # None: the weights of no whole adapter

    def open(self, name: str, folder: Path) -> None:
        """Reads an adapter, ours or one that PEFT saved, in place of one of this name."""
        if (folder / CONFIG).exists():
            check_exported(folder, self._base)
        updates = read_peft(folder, self._model)
        self.use("")
        if not self._plain:
            linears = matmul_weights(self._model)
            self._plain = {each: each.weight.detach().clone() for each in linears}
        self._present = None
        self._add(updates)
        _check_finite(self._model)
        self._opened[name], self._present = updates, name

    @torch.no_grad()
    def _add(self, updates: Updates) -> None:
        for name, (a, b) in updates.items():
            weight = self._model.get_parameter(f"{name}.weight")
            weight.copy_(weight + (b.to(weight.device) @ a.to(weight.device)))

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Gives the model this adapter; an empty name: none."""
        if name == self._present:
            return
        self._present = None
        for linear, weight in self._plain.items():
            linear.weight.copy_(weight)
        if name:
            self._add(self._opened[name])
        self._present = name


def write_peft(folder: Path, options: Lora, values: Values, model: nn.Module, base: str) -> None:
    """Writes the two files. `values`: of the adapter of `model`, under the run's names; `base`: name of the weights that
    it is for."""
    updates = whole_updates(model, values)
    tensors = {
        f"{_PREFIX}{name}.lora_{letter}.weight": value.contiguous()
        for name, pair in updates.items()
        for letter, value in zip("AB", pair, strict=True)
    }
    save_weights(tensors, folder / PEFT_WEIGHTS, {"format": "pt"})
    layers = {re.sub(r"\d+", r"\\d+", re.escape(name)) for name in updates}
    ranks = {name.rpartition(".")[2]: len(a) for name, (a, _) in updates.items()}
    content = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": "|".join(sorted(layers)),
        "rank_pattern": ranks,
        "alpha_pattern": {
            name: options.alpha * rank / options.rank for name, rank in ranks.items()
        },
    }
    write_atomic(folder / PEFT_CONFIG, json.dumps(content, indent=1) + "\n")


def read_peft(folder: Path, model: nn.Module) -> Updates:
    """An adapter for `model` in PEFT's files. Raises InputError where its settings mean more than low-rank updates of the
    layers that ours have."""
    what = "save a LoRA adapter of plain settings by PEFT's save_pretrained"
    with reading(folder / PEFT_CONFIG, what):
        config = read_json_file(folder / PEFT_CONFIG)
        for key, allowed in _PLAIN.items():
            if config.get(key, allowed[0]) not in allowed:
                raise ValueError(f"{key} = {config[key]!r} is not supported")
        alphas = dict(config.get("alpha_pattern") or {})
        default, takes_root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
    with reading(folder / PEFT_WEIGHTS, what):
        tensors, shapes = read_weights(folder / PEFT_WEIGHTS)[0], adapter_shapes(model, 1)
        updates, used = {}, set[str]()
        for key in tensors:
            match = _KEY.fullmatch(key)
            name = match[1] if match else ""
            if f"{name}.lora_a" not in shapes:
                raise ValueError(f"{key} is not an update of a projection of the decoder")
            a, b = (tensors[f"{_PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
            rank, width, out = len(a), shapes[f"{name}.lora_a"][1], shapes[f"{name}.lora_b"][0]
            fits = (a.shape, b.shape) == ((rank, width), (out, rank))
            if not fits or not 0 < rank <= max(width, out):
                raise ValueError(
                    f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit the model"
                )
            ends = [end for end in alphas if f".{name}".endswith(f".{end}")]
            alpha = alphas[ends[0]] if ends else default
            used |= {*ends[:1]}
            scale = float(alpha) / (math.sqrt(rank) if takes_root else rank)
            updates[name] = a.float(), scale * b.float()
        if left := sorted(alphas.keys() - used):
            raise ValueError(
                f"alpha_pattern names {left[0]!r}, which is the end of no layer's name"
            )
        if not updates:
            raise ValueError("it has no update")
    return updates
