"""Saves, keeps, verifies and loads the checkpoints of a run."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager, ModelWrapper
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.config.exported import is_exported
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import InputError, first_line, require
from torchtitan.models.dit_tts.infra.adapters import is_trained
from torchtitan.models.dit_tts.infra.collectives import (
    gather_from_ranks,
    run_on_all_ranks,
    single_process,
)
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.run import checkpoint_storage as storage
from torchtitan.models.dit_tts.run.grown_vocabulary import find_grown, load_grown
from torchtitan.models.dit_tts.run.manifest import MANIFEST, checkpoint_steps
from torchtitan.models.dit_tts.run.resume_rules import (
    adapter_base,
    check_trained_with,
    misfit,
    trained_with,
)
from torchtitan.models.dit_tts.run.run_folder import RunFolder
from torchtitan.models.dit_tts.text.build_tokenizer import origin_of_weights
from torchtitan.models.dit_tts.text.encoder_record import begins_to_train
from torchtitan.models.dit_tts.text.hf_encoder import find_source

_CAPTIONS = "caption_encoder."
"""begin of the names of its weights"""


class _TrainedWeights(ModelWrapper):
    """A model of which checkpoints have what an adapter's run trains."""

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: v for name, v in super()._get_state_dict().items() if is_trained(name)}


class RunCheckpointer(CheckpointManager):
    """Upstream's checkpoint manager for a run that never overwrites what an earlier start trained, whose
    checkpoints are complete or absent, and are verified before they are loaded.

    Args:
        on_load: called once the checkpoint is loaded, or there is none.
        parts: upstream's: dataloader, model_parts, optimizers, lr_schedulers, states.
    """

    def __init__(
        self,
        config: JobConfig,
        run_folder: RunFolder,
        ema: EMA | None,
        on_load: Callable[[], None],
        **parts: Any,
    ):
        self.config = config
        self.run_folder = run_folder
        self.ema = ema
        self.on_load = on_load
        self.trained_with = trained_with(config)
        self.saved_step = -1
        self.adapts = config.lora.rank > 0
        if self.adapts and config.checkpoint.enable:
            self.trained_with |= adapter_base(Path(str(config.checkpoint.initial_load_path)))
        self.has_saved = False
        self.best_step: int | None = None
        """whose checkpoint is kept however old it is"""
        if ema is not None:
            parts["states"]["ema"] = ema
        super().__init__(
            checkpoint_config=config.checkpoint,
            sd_adapter=None,
            base_folder=str(run_folder.path),
            **parts,
        )
        if self.adapts:
            self.states[MODEL] = _TrainedWeights(parts["model_parts"])

    # Saving

    def save(self, curr_step: int, last_step: bool = False) -> None:
        # Undoing a step may lead to one that is saved already, or to the beginning.
        if last_step or curr_step not in (0, self.saved_step):
            super().save(curr_step, last_step)

    def save_now(self, step: int) -> None:
        """A complete checkpoint of this step, written before the call returns; nothing where it was
        saved already."""
        self.wait()
        if not self.writes or self.saved_step == step:
            return
        states = self._flattened_model_states_sd()
        self.dcp_save(states, self._create_checkpoint_id(step), AsyncMode.DISABLED)
        self._purge_stale_checkpoints()

    def finish(self) -> None:
        """Waits for the last save, after which upstream removes no older checkpoint."""
        self.wait()
        if self.writes:
            self._purge_stale_checkpoints()

    def keep(self, step: int) -> None:
        """Saves this step, if it is not saved yet, and keeps its checkpoint. The best one before it, if it
        was saved for that alone, is removed."""
        before, self.best_step = self.best_step, step
        self.save_now(step)
        if not self.writes:
            return
        path = Path(self.folder) / f"step-{before}"
        for_that_alone = before not in (None, step) and before % self.interval != 0
        if for_that_alone and path.exists() and dist.get_rank() == 0:
            storage.remove_checkpoint(path)
        self._purge_stale_checkpoints()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        writer = storage.CheckpointWriter(checkpoint_id, self.trained_with)
        self.has_saved = True
        self.saved_step = int(Path(checkpoint_id).name.removeprefix("step-"))
        # Even alone, a process would exchange the plan with itself, and every later step be slower for it.
        options: dict[str, Any] = {"storage_writer": writer, "no_dist": single_process()}
        if async_mode != AsyncMode.DISABLED:
            return dcp.async_save(state_dict, process_group=self.pg, **options)
        with self._completing_a_save():
            dcp.save(state_dict, **options)
        return None

    def _async_wait(self) -> None:
        """Waits for a save that is still under way."""
        future, self.save_future = getattr(self, "save_future", None), None
        if future is not None:
            with self._completing_a_save():
                future.result()

    wait = _async_wait

    @contextmanager
    def _completing_a_save(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError, RuntimeError) as error:
            raise self._save_error(error) from error
        self.run_folder.saved_step = self.saved_step

    def _save_error(self, error: BaseException) -> InputError:
        """The error of a failed save for the user; what it has written is removed."""
        failures = error.failures if isinstance(error, CheckpointException) else {}
        # The ranks' reasons are mostly alike.
        reasons = {first_line(cause) for cause, _ in failures.values()} or {first_line(error)}
        folder, step = Path(self.folder), self.saved_step
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"step-{step}.saving", ignore_errors=True)
        # torch's writer of files does not always pass the reason on: of a full disk it tells two positions in a file.
        is_full = any(
            text in why for why in reasons for text in ("No space left", "unexpected pos")
        )
        why = "no space is left on the disk" if is_full else "; ".join(sorted(reasons))
        free, steps = shutil.disk_usage(folder).free, checkpoint_steps(folder)
        return InputError(
            f"{folder}: step {step} could not be saved ({why}; without it {free / 2**30:.2f} GiB are free); "
            f"{'free some' if is_full else 'remove the cause'} and give the same command again, which continues from "
            f"{f'step {steps[-1]}' if steps else 'its beginning'}"
        )

    def _purge_stale_checkpoints(self) -> None:
        """Removes what `keep_latest_k` does not keep, in the background. Upstream's would take any name
        with step-N in it."""
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        folder = Path(self.folder)
        steps = [step for step in checkpoint_steps(folder) if step != self.best_step]
        for step in steps[: -self.keep_latest_k]:
            path = folder / f"step-{step}"
            leaving = path.with_name(f"{path.name}.deleting")
            os.rename(path, leaving)
            logger.info(f"Removing {path}: keep_latest_k = {self.keep_latest_k}")
            self.purge_queue.put(str(leaving))

    def close(self) -> None:
        try:  # the process may end because of another error
            self._async_wait()
        except InputError as error:
            logger.error(str(error))
        super().close()

    # Loading

    def load(self, step: int = -1) -> bool:
        """Loads the newest valid checkpoint of the run folder, else the initial weights."""
        if self.writes:
            self._remove_left_behind()
        self._refuse_to_lose_steps(step)
        excluded = self.config.checkpoint.exclude_from_loading
        require(
            not self.enable or set(excluded) <= set(self.states),
            f"[checkpoint] exclude_from_loading = {excluded}, but it must be some of {[*self.states]}",
        )
        path = self._checkpoint_to_load() if self.enable else None
        resumes = path is not None and path.parent == Path(self.folder)
        if self.adapts and self.enable:
            self._load_base()
            path = path if resumes else None
        if path is not None:
            logger.info(f"Loading {path}")
            self._load(path, resumes)
        self.on_load()
        return path is not None

    def _load_base(self) -> None:
        """Loads the weights that an adapter's run leaves as they are, at every start."""
        path = Path(str(self.initial_load_path))
        if problem := storage.verify_together(path):
            raise InputError(f"{problem}; restore it, as the adapter is for these weights")
        check_trained_with(path, self.trained_with, self.config.resume.allow, resumes=False)
        require(
            find_grown(self.config, self.run_folder.path) is None,
            f"the data has tokens that {path} does not know (named above), and an adapter does not train their embedding; "
            f"train all weights ([lora] rank = 0, no --method lora), or leave these texts out",
        )
        logger.info(f"Loading {path}, which stays as it is")
        whole = ModelWrapper(self.states[MODEL].model)
        frozen = {name: v for name, v in whole.state_dict().items() if not is_trained(name)}
        try:
            storage.load_checkpoint(frozen, path)
        except (CheckpointException, RuntimeError) as error:
            raise misfit(path, error) or error from None
        whole.load_state_dict(frozen)

    def roll_back(self) -> bool:
        """Loads the newest valid checkpoint once more, and with it the state of everything else. A
        collective. Returns whether there was one: False before the run's first save.
        """
        if not self.writes:
            return False
        self.wait()
        if self.saved_step <= 0 or (self.exclude_from_loading and not self.has_saved):
            return False  # a part of the state at this start is in no checkpoint
        path = self._checkpoint_to_load()
        assert path is not None
        self.exclude_from_loading = []
        self._load(path, resumes=True)
        return True

    @property
    def writes(self) -> bool:
        """True if the run saves checkpoints, and can be resumed."""
        return self.enable and not self.load_only

    def _remove_left_behind(self) -> None:
        def remove(rank: int) -> None:
            for name in storage.remove_left_behind(Path(self.folder)) if rank == 0 else ():
                logger.warning(f"Removed {self.folder}/{name} of an earlier start")

        run_on_all_ranks(remove, "remove what an earlier start left behind")

    def _refuse_to_lose_steps(self, step: int) -> None:
        if not self.writes:
            require(
                not any(row["step"] for row in self.run_folder.metrics.read()),
                f"{self.run_folder.path} already holds a run's metrics, which a run that does not resume from its "
                f"checkpoints would overwrite; give another [job] experiment or remove the folder",
            )
            return
        newest = max(checkpoint_steps(Path(self.folder)), default=-1)
        require(
            step in (-1, newest),
            f"[checkpoint] load_step = {step}, but the newest checkpoint in {self.folder} is step {newest}, and training "
            f"from an older one would overwrite it; give a new [job] experiment with [checkpoint] initial_load_path = "
            f".../step-{step} and initial_load_model_only = false",
        )

    def _checkpoint_to_load(self) -> Path | None:
        folder, corrupt = Path(self.folder), []
        for step in reversed(checkpoint_steps(folder)):
            path = folder / f"step-{step}"
            problem = storage.verify_together(path)
            if problem is None:
                return path
            corrupt.append(problem)
            if not self.writes:
                raise InputError(f"{problem}; restore it or remove the folder")
            if dist.get_rank() == 0:
                aside = storage.set_aside(path)
                logger.error(f"{problem}; it is set aside as {aside.name}")
            dist.barrier()
        had = gather_from_ranks(self.run_folder.earlier.get("saved_step"))[0]
        reason = corrupt[0] if corrupt else f"the run had saved step {had}"
        require(
            not corrupt and had is None,
            f"{folder} has no valid checkpoint left ({reason}), and starting over would overwrite what the run has "
            f"written; restore a checkpoint or give another [job] experiment",
        )
        if not self.initial_load_path:
            return None
        path = Path(self.initial_load_path)
        if not is_exported(path) and not os.path.isfile(path / MANIFEST):
            logger.warning(f"{path} has no {MANIFEST}: it is loaded without being verified")
        elif problem := storage.verify_together(path):
            raise InputError(f"{problem}; restore it or give another initial_load_path")
        return path

    def _load(self, path: Path, resumes: bool) -> None:
        model_only = path.name == "step-0" if resumes else self.initial_load_model_only
        steps = self.config.training.steps
        require(
            not resumes or steps >= int(path.name.removeprefix("step-")),
            f"[training] steps = {steps}, but {path} is already past it; raise it, or give another [job] experiment",
        )
        allowed = self.config.resume.allow
        check_trained_with(path, self.trained_with, allowed, resumes and not model_only)
        states = dict(self._states_to_load(model_only))  # not upstream's own dictionary
        if self._starts_to_train_text_encoder(model_only):
            states = {k: value for k, value in states.items() if not k.startswith("text_encoder.")}
        grown = None if resumes else find_grown(self.config, self.run_folder.path)
        if grown is not None:
            require(
                model_only,
                f"the data has tokens that {path} does not know, which a continued optimizer cannot learn; set "
                f"[checkpoint] initial_load_model_only = true",
            )
            states.pop(grown[0], None)
        table = storage.read_table(path).state_dict_metadata
        if model_only and not any(name.startswith(_CAPTIONS) for name in table):
            # A voice that learns captions: their encoder keeps its initial values.
            states = {k: value for k, value in states.items() if not k.startswith(_CAPTIONS)}
        absent = [
            name
            for name in ("ema", "divergence")
            if name in states and not any(key.startswith(f"{name}.") for key in table)
        ]
        # The loss of other data, another objective or another rate has another level.
        changed = bool(self.config.resume.allow) or "dataloader" in self.exclude_from_loading
        if "divergence" in states and (not resumes or (changed and not self.has_saved)):
            absent.append("divergence")
        states = {name: state for name, state in states.items() if name not in absent}
        if self.ema is not None and "ema" in states:
            self.ema.read_from(table)
        try:
            storage.load_checkpoint(states, path)
        except (CheckpointException, RuntimeError) as error:
            raise misfit(path, error) or error from None
        self.states[MODEL].load_state_dict(states)
        if grown is not None:
            load_grown(self.states[MODEL].model[0], path, *grown)
        if "ema" in absent:
            assert self.ema is not None
            self.ema.restart()
            logger.warning(f"{path} holds no averaged weights: the average starts at its weights")
        if resumes:
            self.saved_step = self.run_folder.saved_step = int(path.name.removeprefix("step-"))

    def _starts_to_train_text_encoder(self, model_only: bool) -> bool:
        """True if the weights to be loaded are of a run that did not train its text encoder, and this
        one does: the encoder then keeps its pretrained weights."""
        encoder, folder = self.config.encoder, self.run_folder.path
        origin = origin_of_weights(self.config, folder)
        if origin is None or not is_pretrained(encoder.model):
            return False
        source = find_source(encoder.model, folder=folder)
        may_begin = origin != folder and model_only
        return begins_to_train(origin, encoder, source.fingerprint, may_begin)
