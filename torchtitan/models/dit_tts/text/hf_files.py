"""Files of a pretrained text encoder, on this machine or on the hub: its config, weights and digests."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import load_local_or_hub, quiet_transformers

if TYPE_CHECKING:  # importing it takes seconds, and runs with the learned encoder do without it
    from transformers import PretrainedConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""of a checkpoint in one file; one in parts has NAME.index.json instead"""


_T5GEMMA2 = {"model_type": "t5gemma2_text", "head_dim": 256, "query_pre_attn_scalar": 256}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "sliding_window", "vocab_size"),
)
KNOWN_SIZES: dict[str, dict[str, Any]] = {
    f"google/t5gemma-2-{name}-{name}": _T5GEMMA2 | dict(zip(_SIZES, (*sizes, 262_144), strict=True))
    for name, sizes in {
        "270m": (640, 2048, 18, 4, 1, 512),
        "1b": (1152, 6912, 26, 4, 1, 512),
        "4b": (2560, 10240, 34, 8, 4, 1024),
    }.items()
}
"""text configs as the hub has them, so that sizes are known before any download"""


def download_by_hand(model: str) -> str:
    """What to do where a model's files are not complete."""
    return f"give a complete folder, or download it on a machine with network access: hf download {model}"


def load_hf_config(model: str, download: bool) -> "PretrainedConfig":
    """The config of a model; without a download also from KNOWN_SIZES. Arguments as of `load_local_or_hub`."""
    from transformers import AutoConfig

    def load(**where: Any) -> "PretrainedConfig":
        return AutoConfig.from_pretrained(model, **where)

    try:
        with quiet_transformers():
            return load_local_or_hub(load, model, download=download)
    except Exception as error:  # the library's validators raise kinds of their own
        if not download and model in KNOWN_SIZES:
            return make_hf_config(KNOWN_SIZES[model])
        raise InputError(
            f"[encoder] model = {model!r} cannot be found ({first_line(error)}); {download_by_hand(model)}"
        ) from error


def make_hf_config(sizes: dict[str, Any]) -> "PretrainedConfig":
    """A config from its JSON."""
    if sizes["model_type"] == "t5gemma2_text":  # not in the mapping of every version
        from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2TextConfig

        return T5Gemma2TextConfig.from_dict(sizes)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)


def weight_files(model: str) -> list[Path]:
    """Weight files of a folder, or of a hub name in its cache; empty where any is missing."""
    for name in WEIGHTS:
        single = _file(model, name)
        if single is not None:
            return [single]
        index = _file(model, f"{name}.index.json")
        if index is not None:
            names = sorted(set(read_json(index, weight_map=dict).get("weight_map", {}).values()))
            paths = [_file(model, part) for part in names]
            return [path for path in paths if path is not None] if all(paths) else []
    return []


def _file(model: str, name: str) -> Path | None:
    if os.path.isabs(model) or os.path.isdir(model):
        path = Path(model, name)
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name)
    return Path(found) if isinstance(found, str) else None


def fetch_weights(model: str) -> None:
    """Downloads config, tokenizer and weights of a hub name whose weights are not on this machine."""
    if weight_files(model):
        return
    if os.path.isabs(model) or os.path.isdir(model):
        raise InputError(
            f"[encoder] model = {model!r} has no weights ({' or '.join(WEIGHTS)}); restore them, or give the folder's new "
            "path by --encoder (for train --encoder.model)"
        )
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model"])
        if not weight_files(model):
            snapshot_download(model, allow_patterns=["pytorch_model*"])
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"[encoder] model = {model!r} cannot be downloaded ({first_line(error)}); {download_by_hand(model)}"
        ) from error


def contents_digest(path: Path) -> bytes:
    """XXH3 of a file."""
    contents = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            contents.update(block)
    return contents.digest()
