"""A run or an exported folder that is to speak, by its path or by its name in the package or on the Hugging Face hub, and
its checkpoint: found once, before anything is loaded."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.exported import is_exported, read_exported
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.config.validation_figures import saved_prefixes
from torchtitan.models.dit_tts.errors import InputError, first_line, require
from torchtitan.models.dit_tts.run.manifest import checkpoint_steps
from torchtitan.models.dit_tts.validation.history import (
    BEST,
    RAW,
    best_row,
    read_rows,
    weights_name,
    weights_of,
)

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


@dataclass(frozen=True)
class OpenRun:
    folder: Path
    config: JobConfig
    """the run's, or with what a command changes in it"""

    step: int
    weights: str
    """"raw", "ema" for the slowest average, or "ema:0.999"; empty: those with the lowest held-out loss at the last
    validation up to the step, else as "ema", or "raw" where there is no average"""

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        if is_exported(self.folder):
            return self.folder
        return self.folder / self.config.checkpoint.folder / f"step-{self.step}"

    def find_weights(self) -> tuple[str, str]:
        """(name of the weights, prefix of their entries in the checkpoint). Raises InputError where it does not hold
        them."""
        if is_exported(self.folder):
            return self.weights, ""
        # With DCP, whose import takes a second and which an exported folder does not need.
        from torchtitan.models.dit_tts.run.checkpoint_storage import read_table

        prefixes = saved_prefixes(read_table(self.path).state_dict_metadata)
        found = {weights_name(prefix): f"ema.{prefix}" for prefix in prefixes} | {RAW: ""}
        slowest = next(reversed([name for name in found if name != RAW]), None)
        wanted = self.weights
        if not wanted:
            rows = read_rows(self.folder)
            judged = [row for row in rows if row["step"] <= self.step and "best_weights" in row]
            wanted = judged[-1]["best_weights"] if judged else ""
            if wanted not in found:
                wanted = slowest or RAW
        if wanted == "ema" and slowest is not None:
            wanted = slowest
        known = ", ".join(found)
        require(
            wanted in found,
            f"{self.path} holds no weights {wanted!r}; give one by --weights: {known}",
        )
        return wanted, found[wanted]


def open_run(
    name: str | Path,
    step: int | str | None = None,
    weights: str = "",
    config: JobConfig | None = None,
) -> OpenRun:
    """Finds the checkpoint of a run or of an exported folder.

    Args:
        name: a text may also be a name on the hub.
        step: step of the checkpoint; "best": the one that `[validation] keep_best` kept; None: the last.
        weights: as in `OpenRun`; empty with "best": those that it was measured with.
        config: of the run, if it is known already.
    """
    folder = find_folder(name) if isinstance(name, str) else name
    config = config or load_run_config(folder)
    if is_exported(folder):
        has = read_exported(folder)
        require(
            step in (None, has["step"]) and weights in ("", has["weights"]),
            f"{folder} has step {has['step']} and weights {has['weights']} only; leave out --step and --weights, or "
            f"give the run's folder",
        )
        return OpenRun(folder, config, has["step"], has["weights"])
    checkpoints = folder / config.checkpoint.folder
    steps = checkpoint_steps(checkpoints)
    require(bool(steps), f"{checkpoints} has no complete checkpoint; train the run further first")
    known = ", ".join(map(str, steps))
    if step == BEST:
        figure = config.validation.keep_best
        # A kill may have left the row of a step without its checkpoint.
        best = best_row([row for row in read_rows(folder) if row["step"] in steps], figure)
        if best is None:
            why = f"no validation has measured {figure} yet" if figure else "keep_best is not set"
            raise InputError(f"{folder} has no best step: {why}; give a --step of: {known}")
        step, weights = best["step"], weights or weights_of(best, figure)
    step = steps[-1] if step is None else step
    require(step in steps, f"{checkpoints} has no checkpoint step-{step}; it has steps: {known}")
    return OpenRun(folder, config, int(step), weights)
