"""Trackers of a run: TensorBoard in its tb/ folder, and Weights & Biases. Rank 0 alone has them.

Names are grouped by what stands before the `/`: `loss`, which comes first on TensorBoard's page, then
`speech/`, `speed/`, `train/` and `validation/`.
"""

import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.bounded import read_json_file, read_toml
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.models.dit_tts.files import write_atomic

Values = Mapping[str, float | int | tuple[torch.Tensor, int] | bytes | None]
"""Values by grouped name such as `speed/mfu`: a number; a sound (waveform (samples,) in [-1, 1], sample rate in Hz); a picture,
the bytes of a PNG file; None is left out"""

_WANDB_FILE, _IDENTITY = "wandb.json", ("entity", "project", "id")

_FINISH_SECONDS = 30.0
"""Time limit of W&B's uploads when a run ends; the rest stays on the disk"""


class Trackers:
    """All trackers that a run's config asks for; without any it does nothing."""

    def __init__(self, config: JobConfig, folder: Path):
        """`folder`: the run's, with config.toml and env.json. Raises InputError where W&B cannot be opened."""
        self._tb = folder / "tb" if config.metrics.enable_tensorboard else None
        self._writer: Any = None  # of TensorBoard
        self._wandb_run: Any = _open_wandb(config, folder) if config.metrics.enable_wandb else None

    def continue_after(self, step: int) -> None:
        """Called before anything is logged, and again when the run goes back to `step`: TensorBoard hides later steps, W&B
        has repeated ones twice."""
        if self._tb is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # imports hundreds of modules

        if self._writer is not None:
            self._writer.close()
        # A run that begins anew may log its step 0 again.
        self._writer = SummaryWriter(str(self._tb), purge_step=step + 1 if step else 0)

    def log(self, values: Values, step: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if self._writer is not None:
            for name, value in known.items():
                if isinstance(value, tuple):
                    self._writer.add_audio(name, value[0][None], step, value[1])
                elif isinstance(value, bytes):
                    pixels = np.asarray(_picture(value))
                    self._writer.add_image(name, pixels, step, dataformats="HWC")
                else:
                    self._writer.add_scalar(name, value, step)
        if self._wandb_run is not None:
            try:
                shown = {name: _for_wandb(value) for name, value in known.items()}
                self._wandb_run.log({**shown, "step": step})
            except Exception as error:  # such as: a signal to the whole job has ended its process
                self._give_up(error)

    def close(self) -> None:
        """Writes what is left. While an error propagates, the run is marked as failed at W&B."""
        if self._wandb_run is not None:
            try:
                self._wandb_run.finish(exit_code=int(sys.exc_info()[0] is not None))
            except Exception as error:
                self._give_up(error)
            self._wandb_run = None
        if self._writer is not None:
            self._writer.close()

    def _give_up(self, error: Exception) -> None:
        self._wandb_run = None
        logger.error(
            f"W&B has failed ({error!r}); the run continues without it until its next start"
        )


def _picture(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))


def _for_wandb(value: Any) -> Any:
    import wandb

    if isinstance(value, tuple):
        return wandb.Audio(value[0].numpy(), sample_rate=value[1])
    return wandb.Image(_picture(value)) if isinstance(value, bytes) else value


def _open_wandb(config: JobConfig, folder: Path) -> Any:
    """The run at W&B, which every start continues: the run folder keeps its id.

    W&B drops what is logged at a smaller step than before, as a resume does; so our step is a metric of
    its own, over which W&B plots the others.
    """
    import wandb

    file = folder / _WANDB_FILE
    known: dict[str, str | None] = {}
    if file.exists():
        try:
            content = read_json_file(file)
            known = {name: content[name] for name in _IDENTITY}
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{file} is corrupt; delete it to begin a new run at W&B") from None
    project = config.metrics.wandb_project or os.environ.get("WANDB_PROJECT") or "titan-tts"
    try:
        run = wandb.init(
            id=known.get("id"),
            entity=known.get("entity"),
            project=known.get("project") or project,
            resume="allow",
            name=config.job.experiment,
            dir=str(folder),
            config={
                **read_toml(folder / "config.toml"),
                "environment": read_json_file(folder / "env.json"),
            },
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
        raise _no_wandb(error) from None
    if not run.disabled:  # WANDB_MODE=disabled has a run of no project
        identity = {name: getattr(run, name) or None for name in _IDENTITY}
        write_atomic(file, json.dumps(identity) + "\n")
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _no_wandb(error: Exception) -> InputError:
    reason = " ".join(str(error).split()).rstrip(".")
    return InputError(
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
        raise _no_wandb(error) from None
    if not found:
        raise InputError(
            "[metrics] enable_wandb = true, but no key for W&B was found; set WANDB_API_KEY in the "
            "environment or in a file .env, or set WANDB_MODE=offline"
        )
