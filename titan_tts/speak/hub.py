"""Finds models by name, as a folder, a model of the package or a repository of the Hugging Face hub."""

import re
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
"""Patterns of an exported folder's files: no others come from the hub"""


@cache
def find_folder(name: str, patterns: tuple[str, ...] = FILES) -> Path:
    """The folder of a run or of an exported model. `name`: a folder, titan_tts:NAME of the package, or OWNER/NAME on
    the hub, whose files of these patterns are downloaded into the hub's cache. Where OWNER is a local folder, so is
    NAME."""
    path = Path(shipped_path(name))
    if (
        path.exists()
        or path.parent.is_dir()
        and path.parent != Path(".")
        or not _HUB_NAME.fullmatch(name)
    ):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is not a folder, and cannot be downloaded from the hub ({first_line(error)}); give a folder of "
            f"a run or an export, or a public model's name, with HF_TOKEN in the environment for others"
        ) from None
