"""Trackers of a run: TensorBoard in its tb/ folder, and Weights & Biases. Rank 0 alone has them.

Names are grouped by what stands before the `/`: `loss`, which comes first on TensorBoard's page, then
`speech/`, `speed/`, `train/` and `validation/`.
"""

import io
import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.bounded import read_json_file, read_toml
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.models.dit_tts.files import write_atomic

WANDB_FILE = "wandb.json"
"""File in the run folder with entity, project and id at W&B"""

_IDENTITY = ("entity", "project", "id")

_FINISH_SECONDS = 30.0
"""What W&B may still take for its uploads when a run ends; the rest stays on the disk"""


class _TensorBoard:
    """One folder per run; a resume hides the steps that it repeats."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None  # until continue_after; its module imports hundreds of others

    def continue_after(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        # A run that begins anew may log its step 0 again.
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else 0)

    def log_scalars(self, values: Mapping[str, float | int], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_audio(self, name: str, waveform: Tensor, sample_rate: int, step: int) -> None:
        self._writer.add_audio(name, waveform[None], step, sample_rate)

    def log_image(self, name: str, png: bytes, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        width, height = struct.unpack(">II", png[16:24])  # of the first chunk, IHDR
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        summary = Summary(value=[Summary.Value(tag=name, image=image)])
        self._writer.file_writer.add_summary(summary, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WandB:
    """A run at W&B, which every start continues: the run folder keeps its id.

    W&B drops what is logged at a smaller step than before, as a resume does; so our step is a metric of
    its own, over which W&B plots the others.
    """

    def __init__(self, config: JobConfig, folder: Path):
        """Raises InputError where the run cannot be opened."""
        import wandb

        self._wandb = wandb
        file = folder / WANDB_FILE
        known = _known_run(file)
        try:
            self._run: Any = wandb.init(
                id=known.get("id"),
                entity=known.get("entity"),
                project=known.get("project")
                or config.metrics.wandb_project
                or os.environ.get("WANDB_PROJECT")
                or "titan-tts",
                resume="allow",
                name=config.job.experiment,
                dir=str(folder),
                config=_recorded(folder),
                # Its own record of the machine has the command line with what may be secret in URLs.
                settings=wandb.Settings(
                    console="off",
                    quiet=True,
                    disable_git=True,
                    x_disable_meta=True,
                    finish_timeout=_FINISH_SECONDS,
                ),
            )
        except wandb.Error as error:
            raise InputError(_no_wandb(error)) from None
        known = {name: getattr(self._run, name) or None for name in _IDENTITY}
        if not self._run.disabled:  # WANDB_MODE=disabled has a run of no project
            write_atomic(file, json.dumps(known) + "\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def continue_after(self, step: int) -> None:
        """Nothing is hidden: after a resume W&B has the repeated steps twice."""

    def log_scalars(self, values: Mapping[str, float | int], step: int) -> None:
        self._log(lambda: values, step)

    def log_audio(self, name: str, waveform: Tensor, sample_rate: int, step: int) -> None:
        self._log(
            lambda: {name: self._wandb.Audio(waveform.numpy(), sample_rate=sample_rate)}, step
        )

    def log_image(self, name: str, png: bytes, step: int) -> None:
        from PIL import Image

        self._log(lambda: {name: self._wandb.Image(Image.open(io.BytesIO(png)))}, step)

    def _log(self, values: Callable[[], Mapping[str, Any]], step: int) -> None:
        """values: makes them; sounds and pictures write files of W&B's."""
        if self._run is None:
            return
        try:
            self._run.log({**values(), "step": step})
        except Exception as error:  # such as: a signal to the whole job has ended its process
            self._give_up(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        self._run = None
        logger.error(
            f"W&B has failed ({error!r}); the run continues without it until its next start"
        )


def _known_run(file: Path) -> dict[str, str | None]:
    """The identity that an earlier start has written; empty for a new run."""
    if not file.exists():
        return {}
    try:
        known = read_json_file(file)
        return {name: known[name] for name in _IDENTITY}
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{file} is corrupt; delete it to begin a new run at W&B") from None


def _recorded(folder: Path) -> dict[str, Any]:
    """The run's config and environment as its folder has them, without secrets."""
    config = read_toml(folder / "config.toml")
    return {**config, "environment": read_json_file(folder / "env.json")}


def _no_wandb(error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"[metrics] enable_wandb = true, but W&B refuses or cannot be reached ({reason}); correct that, or "
        f"set WANDB_MODE=offline and upload later with wandb sync"
    )


def check_trackers(config: JobConfig) -> None:
    """Checks before a run starts that what it asks for can be used: packages, key and server of W&B.
    Variables WANDB_* of a file `.env` in the current folder are added to the environment.
    """
    if config.metrics.enable_tensorboard:
        require_modules("tensorboard")
    if not config.metrics.enable_wandb:
        return
    require_modules("wandb", "dotenv", "soundfile", "PIL")
    from dotenv import dotenv_values

    for name, value in dotenv_values(".env").items():
        if name.startswith("WANDB_") and value is not None:
            os.environ.setdefault(name, value)
    import wandb

    if wandb.setup().settings.mode not in ("online", "shared"):
        return
    try:
        found = wandb.login(prompt=False)
    except wandb.Error as error:
        raise InputError(_no_wandb(error)) from None
    if not found:
        raise InputError(
            "[metrics] enable_wandb = true, but no key for W&B was found; set WANDB_API_KEY in the "
            "environment or in a file .env, or set WANDB_MODE=offline"
        )


class Trackers:
    """All trackers that a run's config asks for; without any it does nothing."""

    def __init__(self, config: JobConfig, folder: Path):
        """Opens them. `folder`: the run's, with config.toml and env.json."""
        self._parts: list[_TensorBoard | _WandB] = []
        if config.metrics.enable_wandb:
            self._parts.append(_WandB(config, folder))
        if config.metrics.enable_tensorboard:
            self._parts.append(_TensorBoard(folder / "tb"))

    def continue_after(self, step: int) -> None:
        """Called before anything is logged, and again when the run goes back to `step`: later steps are
        replaced."""
        for part in self._parts:
            part.continue_after(step)

    def log_scalars(self, values: Mapping[str, float | int | None], step: int) -> None:
        """Logs values under grouped names such as `speed/mfu`; those that are None are left out."""
        known = {name: value for name, value in values.items() if value is not None}
        for part in self._parts:
            part.log_scalars(known, step)

    def log_audio(self, name: str, waveform: Tensor, sample_rate: int, step: int) -> None:
        """Logs a waveform.

        Args:
            waveform: (samples,) in [-1, 1], on any device; what exceeds it is clipped.
            sample_rate: in Hz.
        """
        waveform = waveform.detach().float().cpu().clamp(-1, 1)
        for part in self._parts:
            part.log_audio(name, waveform, sample_rate, step)

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """Logs a picture, the bytes of a PNG file, under a name that nothing else has."""
        for part in self._parts:
            part.log_image(name, png, step)

    def close(self) -> None:
        """Writes what is left. While an error propagates, the run is marked as failed at W&B."""
        for part in self._parts:
            part.close()
