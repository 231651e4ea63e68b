"""Finds models by name, as a folder, a model of the package or a repository of the Hugging Face hub, and uploads them."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.errors import InputError, first_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

FILES = (
    *(*exported.READ, exported.CARD, exported.FINE_TUNE, "manifest.json"),
    *(
        f"{folder}/*.{suffix}"
        for folder in (exported.TEXT_ENCODER, exported.DURATIONS)
        for suffix in ("json", "safetensors")
    ),
)
"""Patterns of an exported folder's files: no others go to the hub, or come from there"""


@cache
def find_folder(name: str, patterns: tuple[str, ...] = FILES) -> Path:
    """The folder of a run or of an exported model. `name`: a folder, titan_tts:NAME of the package, or OWNER/NAME on
    the hub, whose files of these patterns are downloaded into the hub's cache. Where OWNER is a local folder, so is
    NAME."""
    path = Path(shipped_path(name))
    if path.exists() or path.parent.is_dir() and path.parent != Path(".") or not is_hub_name(name):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is not a folder, and cannot be downloaded from the hub ({first_line(error)}); give a folder of "
            f"a run or an export, or a public model's name, with HF_TOKEN in the environment for others"
        ) from None


def is_hub_name(name: str) -> bool:
    """True if it has the form OWNER/NAME."""
    return _HUB_NAME.fullmatch(name) is not None


def upload_folder(folder: Path, name: str, patterns: Sequence[str], private: bool, why: str) -> str:
    """Uploads a folder's files of these patterns to a model of the hub, a new one if need be. Returns the commit's
    address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=list(patterns), commit_message=why
        )
    except Exception as error:  # the library's HTTP errors have no common class
        raise InputError(
            f"{name}: the upload failed ({first_line(error)}); log in with hf auth login or give HF_TOKEN, and start "
            f"again; {folder} is complete"
        ) from None
    return str(done)
