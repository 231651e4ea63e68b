"""Files of a pretrained text encoder, on this machine or on the hub: its config, weights and digests."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import (
    load_local_or_hub,
    quiet_transformers,
    user_cache_folder,
    write_atomic,
)

if TYPE_CHECKING:  # importing it takes seconds, and runs with the learned encoder do without it
    from transformers import PretrainedConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""of a checkpoint in one file; one in parts has NAME.index.json instead"""


def _t5gemma2(width: int, mlp: int, layers: int, heads: int, kv_heads: int, window: int) -> dict:
    return {
        "model_type": "t5gemma2_text",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "sliding_window": window,
        "head_dim": 256,
        "vocab_size": 262_144,
        "query_pre_attn_scalar": 256,
    }


KNOWN_SIZES: dict[str, dict[str, Any]] = {
    "google/t5gemma-2-270m-270m": _t5gemma2(640, 2048, 18, 4, 1, 512),
    "google/t5gemma-2-1b-1b": _t5gemma2(1152, 6912, 26, 4, 1, 512),
    "google/t5gemma-2-4b-4b": _t5gemma2(2560, 10240, 34, 8, 4, 1024),
}
"""text configs as the hub has them, so that sizes are known before any download"""


def load_hf_config(model: str, download: bool) -> "tuple[PretrainedConfig, bool]":
    """The config of a model, and whether it is from KNOWN_SIZES, with nothing on this machine; arguments as
    of `load_local_or_hub`."""
    from transformers import AutoConfig

    def load(**where: Any) -> "PretrainedConfig":
        return AutoConfig.from_pretrained(model, **where)

    try:
        with quiet_transformers():
            return load_local_or_hub(load, model, download=download), False
    except Exception as error:  # the library's validators raise kinds of their own
        if not download and model in KNOWN_SIZES:
            return make_hf_config(KNOWN_SIZES[model]), True
        raise InputError(
            f"[encoder] model = {model!r} cannot be found ({first_line(error)}); give a folder that has "
            f"its config.json, or download it on a machine with network access: hf download {model}"
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
    if os.path.isdir(model):
        raise InputError(
            f"[encoder] model = {model!r}: the folder lacks weights ({' or '.join(WEIGHTS)}, in one file "
            f"or in the parts of its index.json); restore them"
        )
    if os.path.isabs(model):
        raise InputError(
            f"[encoder] model = {model!r} does not exist any more; restore the folder, or give its path "
            f"by --encoder (for train --encoder.model)"
        )
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model"])
        if not weight_files(model):
            snapshot_download(model, allow_patterns=["pytorch_model*"])
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"[encoder] model = {model!r} cannot be downloaded ({first_line(error)}); download it on a "
            f"machine with network access: hf download {model}"
        ) from error


def contents_digest(path: Path) -> bytes:
    """XXH3 of a file. It is read once and stored in the user's cache folder for its size and time."""
    status = path.stat()
    version = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    name = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()
    stored = Path(user_cache_folder("weights"), name)
    try:
        found = bytes.fromhex(stored.read_text())
        if len(found) == 16:
            return found
    except (OSError, ValueError):
        pass
    contents = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            contents.update(block)
    with contextlib.suppress(OSError):  # then it is read again next time
        write_atomic(stored, contents.hexdigest())
    return contents.digest()
