"""DAC-VAE weights on disk: find, read, check and fold them; write them as safetensors.

Two kinds of files, both with the released model's names (`released_names`):
- `weights.pth`: {"state_dict": tensors, "metadata": {"kwargs": sizes}}, as it was released;
- `.safetensors`: tensors, with {"sample_rate": Hz} as JSON under "kwargs" in the metadata header.

The sizes follow from the shapes. A convolution's weight may be stored directly (`weight`) or under
weight norm (`weight_g` and `weight_v`, Salimans and Kingma 2016, w = g * v / |v|). Folding computes w in float64, summing in
a fixed order, so that every machine gets the same bits and the same fingerprint.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.dit_tts.bounded import as_weights, parse_json, read_pickle
from torchtitan.models.dit_tts.bounded import read_weights as read_tensors
from torchtitan.models.dit_tts.errors import InputError, first_line, reading
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.codec.dac_vae_network import (
    DacVae,
    DacVaeSizes,
    build_network,
    released_names,
)

SUFFIXES = (".pth", ".safetensors")
RELEASED_FILE = "weights.pth"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Of the released model: a state dict alone does not contain the rate.
_RELEASED_RATE, _RELEASED_HOP = 48_000, 1920
_MAX_RATE = 1_000_000
# Layers that add the watermark, or that only training uses.
_IGNORED = re.compile(
    r"decoder\.wm_model\.(?!encoder_block\.pre\.[01]\.)|decoder\.model\.\d+\.block\.(3|6|7|11)\.|discriminator\."
)
_SHOWN = 5
_FOLDED_ROWS = 64  # rows folded at once; bounds the memory in float64


@dataclass(frozen=True)
class DacVaeWeights:
    """Sizes, and folded float32 weights under `DacVae`'s names, on the CPU."""

    sizes: DacVaeSizes
    tensors: dict[str, Tensor]

    def fingerprint(self) -> str:
        """16 hex digits that change with everything that changes latents or waveforms."""
        rules = "posterior mean, the end mirrored to whole frames"
        digest = hashlib.sha256(f"{rules}, {self.sizes}".encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


def find_weights(name: str) -> tuple[Path, str]:
    """(file, name of the codec that works in any folder) of a path or hub name."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    if path.suffix in SUFFIXES and path.is_file():
        return path, str(path)
    if path.suffix in SUFFIXES or path.exists() or not HUB_NAME.fullmatch(name):
        raise InputError(
            f"codec = {name}, but that is neither a file of weights nor a hub name; known are: mel_dct (without weights), "
            "a .pth or .safetensors file of a DAC-VAE, or a hub name such as facebook/dacvae-watermarked"
        )
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, RELEASED_FILE)), name
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"codec = {name}, but that is not a local path, and the hub's {RELEASED_FILE} cannot be loaded "
            f"({type(error).__name__}: {first_line(error)}); download it elsewhere and give the file's path"
        ) from None


def read_weights(path: Path) -> DacVaeWeights:
    """Read, check and fold a file of weights."""
    if path.suffix == ".pth":
        with reading(path, f"give a released {RELEASED_FILE}"):
            content = read_pickle(path)
            stored = as_weights(content["state_dict"])
            kwargs = dict(content.get("metadata", {}).get("kwargs", {}))
    else:
        with reading(path):
            stored, header = read_tensors(path)
            kwargs = dict(parse_json(header.get("kwargs", "{}")))
    with reading(path):
        stored = fold_weight_norms(stored)
    sizes = read_sizes(path, stored, kwargs)
    names = match_names(path, stored, sizes)
    tensors = {parameter: stored[name].float() for parameter, name in names.items()}
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise InputError(
            f"{path} has weights that are not finite: {_listed(broken)}; copy it again"
        )
    return DacVaeWeights(sizes, tensors)


def match_names(path: Path, stored: Mapping[str, Tensor], sizes: DacVaeSizes) -> dict[str, str]:
    """Parameter of `DacVae` -> its name among the folded weights of a file."""
    layers = released_names(len(sizes.strides))
    found: dict[str, str] = {}
    faults: list[str] = []
    for parameter, wanted in build_network(sizes).named_parameters():
        layer, _, kind = parameter.rpartition(".")
        found[parameter] = name = f"{layers[layer]}.{kind}"
        needed = tuple(wanted.shape)
        if name not in stored:
            faults.append(f"{name} is missing")
        elif (shape := tuple(stored[name].shape)) != needed:
            faults.append(f"{name} has the shape {shape}, not {needed}")
    unknown = sorted(set(stored) - set(found.values()))
    faults += [f"{name} is unexpected" for name in unknown]
    if faults:
        raise InputError(f"{path} is no DAC-VAE of {sizes}: {_listed(faults)}")
    return found


def fold_weight_norms(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of all layers, under `weight` those that were stored as magnitude and direction. What only adds the
    watermark is left out."""
    found = {name: value for name, value in stored.items() if not _IGNORED.match(name)}
    for name in [name for name in found if name.endswith(".weight_g")]:
        layer = name.removesuffix(".weight_g")
        if f"{layer}.weight_v" in found:
            parts = found.pop(name), found.pop(f"{layer}.weight_v")
            found[f"{layer}.weight"] = fold_weight_norm(*parts)
    return found


def fold_weight_norm(magnitude: Tensor, direction: Tensor) -> Tensor:
    """g (n, 1, 1) and v (n, ...) -> float32 weight (n, ...) = g * v / |v|, a norm for each of the n."""
    if magnitude.shape != (len(direction), *[1] * (direction.ndim - 1)):
        raise ValueError(f"a magnitude {tuple(magnitude.shape)} of {tuple(direction.shape)}")
    folded = torch.empty(direction.shape)
    parts = (tensor.split(_FOLDED_ROWS) for tensor in (magnitude.flatten(), direction, folded))
    for g, v, out in zip(*parts, strict=True):
        v = v.double()
        # Not norm(): a running sum has one order, that of a reduction depends on the machine.
        norm = v.square().flatten(1).cumsum(1)[:, -1].sqrt()
        out.copy_(v * (g.double() / norm).view(-1, *[1] * (v.ndim - 1)))
    return folded


def read_sizes(path: Path, stored: Mapping[str, Tensor], kwargs: Mapping[str, Any]) -> DacVaeSizes:
    """The sizes by the shapes of the folded weights; the metadata alone has the rate."""

    def shape(layer: str) -> tuple[int, ...]:
        weight = stored.get(f"{layer}.weight")
        if weight is None or weight.ndim != 3:
            raise InputError(
                f"{path} is no DAC-VAE: it lacks {layer}.weight (or its weight_g and weight_v); give the "
                f"{RELEASED_FILE} of facebook/dacvae-watermarked or an export of it"
            )
        return tuple(weight.shape)

    strides = [shape("encoder.block.1.block.4")[2] // 2]
    while f"encoder.block.{len(strides) + 1}.block.4.weight" in stored:
        strides.append(shape(f"encoder.block.{len(strides) + 1}.block.4")[2] // 2)
    if not all(stride > 0 and stride % 2 == 0 for stride in strides):
        raise InputError(f"{path} has strides {strides}, but a DAC-VAE's are even")
    released = math.prod(strides) == _RELEASED_HOP
    rate = kwargs.get("sample_rate", _RELEASED_RATE if released else None)
    if not isinstance(rate, int) or not 0 < rate <= _MAX_RATE:
        raise InputError(f"{path}: its metadata has sample_rate = {rate!r}, but it must be in Hz")
    return DacVaeSizes(
        encoder_dim=shape("encoder.block.0")[0],
        strides=tuple(strides),
        feature_dim=shape("quantizer.in_proj")[1],
        decoder_dim=shape("decoder.model.0")[0],
        latent_channels=shape("quantizer.out_proj")[1],
        sample_rate=rate,
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def write_safetensors(network: DacVae, path: str | Path) -> None:
    """Write the folded weights under the released names, with the rate in the header."""
    from safetensors.torch import save

    sizes = network.sizes
    names = released_names(len(sizes.strides))
    tensors = {}
    for parameter, tensor in network.state_dict().items():
        layer, _, kind = parameter.rpartition(".")
        tensors[f"{names[layer]}.{kind}"] = tensor.cpu().contiguous()
    header = {"format": "pt", "kwargs": json.dumps({"sample_rate": sizes.sample_rate})}
    write_atomic(path, save(tensors, header))
