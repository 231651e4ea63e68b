"""Files of a pretrained text encoder: on this machine or to be downloaded, and what they hold."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

import xxhash

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file, user_cache_folder

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""of a whole checkpoint; one in parts has NAME.index.json instead"""


def weight_files(model: str) -> list[Path]:
    """Weight files of a folder, or of a hub name in its cache; empty where any is missing."""
    for name in WEIGHTS:
        whole = _file(model, name)
        if whole is not None:
            return [whole]
        index = _file(model, f"{name}.index.json")
        if index is not None:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            paths = [_file(model, part) for part in names]
            return [path for path in paths if path is not None] if all(paths) else []
    return []


def _file(model: str, name: str) -> Path | None:
    if os.path.isdir(model):
        path = Path(model, name)
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name)
    return Path(found) if isinstance(found, str) else None


def fetch_weights(model: str) -> None:
    """Downloads config, tokenizer and weights of a hub name whose weights are not on this machine.

    Raises:
        InputError: they cannot be had.
    """
    if weight_files(model):
        return
    if os.path.isdir(model):
        raise InputError(
            f"[encoder] model = {model!r}: the folder has not all weights ({' or '.join(WEIGHTS)}, whole "
            f"or in the parts of its index.json); restore them"
        )
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model"])
        if not weight_files(model):
            snapshot_download(model, allow_patterns=["pytorch_model*"])
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"[encoder] model = {model!r} cannot be downloaded ({first_line(error)}); fetch it where "
            f"there is a network: hf download {model}"
        ) from error
    if not weight_files(model):
        raise InputError(
            f"[encoder] model = {model!r}: the hub has none of {', '.join(WEIGHTS)}; use a model with "
            f"such weights"
        )


def contents_digest(path: Path) -> bytes:
    """XXH3 of a file, read once: kept in the user's cache folder for the file's size and time."""
    status = path.stat()
    version = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    name = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()
    kept = Path(user_cache_folder("weights"), name)
    try:
        found = bytes.fromhex(kept.read_text())
        if len(found) == 16:
            return found
    except (OSError, ValueError):
        pass  # not read yet, or not by a whole writer
    contents = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            contents.update(block)
    with contextlib.suppress(OSError):  # then it is read again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(kept) as record:
            record.write(contents.hexdigest().encode())
    return contents.digest()


def first_line(error: BaseException | None) -> str:
    """What an error says, for a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
