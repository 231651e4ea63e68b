"""Checkpoints of a run folder: what is removed, refused and left out before upstream loads one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.components.checkpoint import MODEL, CheckpointManager, ModelWrapper
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run_folder import RunFolder
from torchtitan.models.dit_tts.text.build_tokenizer import origin_of_weights
from torchtitan.models.dit_tts.text.encoder_record import check_mode
from torchtitan.models.dit_tts.text.hf_encoder import find_source


class RunCheckpointer:
    """Upstream's checkpoint manager for a run that never overwrites what an earlier start trained.

    Args:
        manager: upstream's, with all states registered.
        config: the run's.
        on_load: called once the checkpoint is loaded, or there is none.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        config: JobConfig,
        run_folder: RunFolder,
        on_load: Callable[[], None],
    ):
        self.manager = manager
        self.config = config
        self.run_folder = run_folder
        self.on_load = on_load
        self.save = manager.save
        self.maybe_wait_for_staging = manager.maybe_wait_for_staging
        self.close = manager.close

    def load(self, step: int = -1) -> bool:
        """Loads as upstream does: the newest checkpoint of the run folder, else the initial weights.

        Raises:
            InputError: training on from there would overwrite steps, or the weights were trained with
                another optimizer or text encoder.
        """
        if self._writes:
            self._remove_unfinished()
        self._refuse_to_lose_steps(step)
        if self._starts_to_train_text_encoder():
            self.manager.states[MODEL] = _WithoutTextEncoder(self.manager.states[MODEL])
        try:
            loaded = self.manager.load(step=step)
        except (CheckpointException, RuntimeError) as error:
            if "Missing key in checkpoint state_dict: optimizer." not in str(error):
                raise
            raise InputError(
                f"[optimizer] name = {self.config.optimizer.name!r}, but the checkpoint was written "
                f"with another optimizer, whose state this one cannot take; set name as it was, or "
                f"start a new run from its weights by [checkpoint] initial_load_path"
            ) from error
        if isinstance(self.manager.states[MODEL], _WithoutTextEncoder):
            self.manager.states[MODEL] = self.manager.states[MODEL].model
        self.on_load()
        return loaded

    @property
    def _writes(self) -> bool:
        return self.manager.enable and not self.manager.load_only

    def _remove_unfinished(self) -> None:
        """A kill during a save leaves a step folder without its metadata. Upstream would count it
        among the latest to keep, and a run's first one would hide initial_load_path."""
        folder = Path(self.manager.folder)
        if dist.get_rank() == 0 and folder.is_dir():
            for path in folder.glob("step-*"):
                if not (path / ".metadata").is_file() and not list(path.glob("*.safetensors*")):
                    shutil.rmtree(path)
            if not os.listdir(folder):
                folder.rmdir()
        dist.barrier()

    def _refuse_to_lose_steps(self, step: int) -> None:
        if not self._writes:
            last = max((row["step"] for row in self.run_folder.metrics.read()), default=0)
            if last:
                raise InputError(
                    f"{self.run_folder.path} already holds a run's metrics up to step {last}, which a "
                    f"run that does not go on from its checkpoints would overwrite; give another "
                    f"[job] experiment or remove the folder"
                )
            return
        folder = Path(self.manager.folder)
        saved = [path.parent.name.removeprefix("step-") for path in folder.glob("step-*/.metadata")]
        newest = max((int(number) for number in saved if number.isdigit()), default=-1)
        if step not in (-1, newest):
            raise InputError(
                f"[checkpoint] load_step = {step}, but the newest checkpoint in {folder} is step "
                f"{newest}, and training from an older one would overwrite it; give a new [job] "
                f"experiment with [checkpoint] initial_load_path = .../step-{step} and "
                f"initial_load_model_only = false"
            )

    def _starts_to_train_text_encoder(self) -> bool:
        """Whether the weights to be loaded are of a run that did not train its text encoder, and this
        one does: the encoder then keeps its pretrained weights."""
        encoder, folder = self.config.encoder, self.run_folder.path
        origin = origin_of_weights(self.config, folder)
        if origin is None or not is_pretrained(encoder.model):
            return False
        source = find_source(encoder.model, folder=folder)
        model_only = self.config.checkpoint.initial_load_model_only
        return check_mode(origin, source, encoder, origin == folder, model_only)


class _WithoutTextEncoder:
    """The model's state while it is loaded from weights without the text encoder's."""

    def __init__(self, model: ModelWrapper):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        state = self.model.state_dict()
        return {
            name: value for name, value in state.items() if not name.startswith("text_encoder.")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict)
