"""Adapters in the files of Hugging Face's PEFT, which has one update for each layer.

    adapter_config.json          rank, alpha, and the layers by a regular expression
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight (rank, in) and .lora_B.weight (out, rank)

Layers of fused matrices fit: `whole_updates` and `from_whole_updates` of `infra/adapters.py` convert without loss.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.models.dit_tts.bounded import read_json_file, read_weights
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.errors import reading
from torchtitan.models.dit_tts.files import save_weights, write_atomic
from torchtitan.models.dit_tts.infra.adapters import (
    adapter_shapes,
    from_whole_updates,
    whole_updates,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight")

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base's weights
    "bias": ("none",),
}
"""Values of settings under which an update is scale · B A, and nothing else is changed"""


def write_peft(
    folder: Path, options: Lora, values: dict[str, torch.Tensor], model: nn.Module, base: str
) -> None:
    """Writes the two files. `values`: of the adapter of `model`, under the run's names; `base`: name of the weights that
    it is for."""
    updates = whole_updates(model, values)
    tensors = {
        f"{_PREFIX}{name}.lora_{letter}.weight": value.contiguous()
        for name, pair in updates.items()
        for letter, value in zip("AB", pair, strict=True)
    }
    save_weights(tensors, folder / WEIGHTS, {"format": "pt"})
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
    write_atomic(folder / CONFIG, json.dumps(content, indent=1) + "\n")


def read_peft(folder: Path, model: nn.Module) -> tuple[Lora, dict[str, torch.Tensor]]:
    """An adapter that PEFT saved, for `model`: as if our own had been trained. Raises InputError where its settings mean
    more than low-rank updates of the layers that ours have."""
    path, what = folder / CONFIG, "save a LoRA adapter of plain settings by PEFT's save_pretrained"
    with reading(path, what):
        config = read_json_file(path)
        for key, allowed in _PLAIN.items():
            if config.get(key, allowed[0]) not in allowed:
                raise ValueError(f"{key} = {config[key]!r} is not supported")
        alphas = dict(config.get("alpha_pattern") or {})
        default, takes_root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
    with reading(folder / WEIGHTS, what):
        tensors, shapes = read_weights(folder / WEIGHTS)[0], adapter_shapes(model, 1)
        updates, used = {}, set[str]()
        for key in tensors:
            match = _KEY.fullmatch(key)
            name = match[1] if match else ""
            if f"{name}.lora_a" not in shapes:
                raise ValueError(f"{key} is not an update of a projection of the decoder")
            a, b = (tensors[f"{_PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
            width, out = shapes[f"{name}.lora_a"][1], shapes[f"{name}.lora_b"][0]
            rank = len(a)
            if (
                a.shape != (rank, width)
                or b.shape != (out, rank)
                or not 0 < rank <= max(width, out)
            ):
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
        values = from_whole_updates(model, updates)
    rank = max(len(a) for a, _ in updates.values())
    return Lora(rank, alpha=rank), values
