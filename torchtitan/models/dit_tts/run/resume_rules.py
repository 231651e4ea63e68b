"""Compares what a checkpoint was trained with to the config that loads it."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import marked
from torchtitan.models.dit_tts.config.marks import TRAINING, WEIGHTS
from torchtitan.models.dit_tts.config.old_keys import REMOVED
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run import manifest

BASE = "lora.base"
"""Entry of a manifest that is not a key of the config: what a LoRA run was trained over"""

_MISFIT = re.compile(
    r"Missing key in checkpoint state_dict: (?P<name>[^\s{]+)|Size mismatch between saved [^{]* for [^\s{]+"
)
"""DCP's messages about tensors that do not fit"""

_OTHER_SIZES = {"model.flavor": "", "lora.rank": ", or another [job] experiment"}
"""Key of which weights of another value fit nowhere, so that nobody is told to allow it -> what else to do"""


def trained_with(config: JobConfig) -> dict[str, Any]:
    """section.key -> value of what decides the training of a run. The loader's state has the order of the
    data, which decides it too."""
    return {key: attrgetter(key)(config) for key in marked(TRAINING, WEIGHTS)}


def adapter_base(path: Path) -> dict[str, str]:
    """Return a hash of the base's files for an adapter's manifest, so that it is never added to other weights."""
    files = manifest.read_manifest(path)["files"]
    hashes = json.dumps({name: each["xxh3"] for name, each in files.items()}, sort_keys=True)
    return {BASE: xxhash.xxh3_64_hexdigest(hashes.encode())}


def check_trained_with(
    path: Path, training: dict[str, Any], allowed: Collection[str], resumes: bool
) -> None:
    """Refuses a checkpoint that was trained otherwise than its new run trains.

    Args:
        training: the run's `trained_with`.
        allowed: [resume] allow.
        resumes: the run continues; else it begins with the checkpoint's weights.
    """
    try:
        # What an earlier version did not record, or this one has no more, has the value that changes nothing.
        defaults = {**trained_with(JobConfig()), **REMOVED}
        saved = {**defaults, **manifest.read_manifest(path)["trained_with"]}
    except InputError:
        return  # initial weights of another program; the caller has said so
    for key, value in {**training, **REMOVED}.items():
        accepted = key in allowed and key != "lora.rank"
        if saved.get(key) == value or accepted or (key == BASE and not resumes):
            continue
        if resumes or key in marked(WEIGHTS):
            remedy = "this version has no such key;" if key in REMOVED else "set it back, or"
            remedy = f"{remedy} accept the change with --resume.allow {key}"
            if key == BASE:
                raise InputError(
                    f"{path} is an adapter of other weights than [checkpoint] initial_load_path names; give those "
                    f"that it was trained over"
                )
            if key in _OTHER_SIZES:
                remedy = f"give --{key} {saved[key]}{_OTHER_SIZES[key]}"
            raise InputError(
                f"{key} = {value!r}, but {path} was trained with {saved[key]!r}; {remedy}"
            )


def misfit(path: Path, error: BaseException) -> InputError | None:
    """The sentence for a checkpoint that has other tensors than this run; None for other errors."""
    found = _MISFIT.search(str(error))
    if found is None:
        return None
    with suppress(InputError):
        rank = manifest.read_manifest(path)["trained_with"].get("lora.rank")
        if rank and not (found["name"] or "").startswith(("dataloader.", "optimizer.")):
            return InputError(
                f"{path} holds an adapter alone ([lora] rank = {rank}), not the weights that it is for; titan-tts export its "
                f"run, and start from that folder"
            )
    return InputError(
        f"{path} does not fit this config ({found[0].rstrip('.')}); set [model], [encoder] and [optimizer] name as they "
        f"were, or start a new run from its weights by [checkpoint] initial_load_path"
    )
