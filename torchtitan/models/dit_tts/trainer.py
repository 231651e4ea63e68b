"""The trainer: upstream's, with the flow-matching step, EMA, audit and the run folder."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.dit_tts.config.batch_split import data_parallel_degree
from torchtitan.models.dit_tts.config.job_config import JobConfig, graphed_components
from torchtitan.models.dit_tts.config.manager import resolve, upstream_view
from torchtitan.models.dit_tts.data.collate import trim_padding
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.forward_pass import ForwardPass, Teacher, measure
from torchtitan.models.dit_tts.infra.collectives import (
    assert_equal_across_ranks,
    gather_from_ranks,
    sum_over_samples,
)
from torchtitan.models.dit_tts.infra.compile import compile_frozen, compiled_graphs
from torchtitan.models.dit_tts.infra.divergence import DivergenceGuard, StepStats
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.optimizer import TTSOptimizers, gradient_norm
from torchtitan.models.dit_tts.infra.parallelize import begin_micro_batch, is_first_copy
from torchtitan.models.dit_tts.infra.ranks import gather_ranks
from torchtitan.models.dit_tts.infra.stop_signal import Progress, StopSignal
from torchtitan.models.dit_tts.infra.text_encoder import build_frozen_encoder
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig
from torchtitan.models.dit_tts.run.benchmark.loader import build_random_encoder
from torchtitan.models.dit_tts.run.benchmark.recorder import BenchmarkRecorder
from torchtitan.models.dit_tts.run.checkpointing import RunCheckpointer
from torchtitan.models.dit_tts.run.manifest import checkpoint_steps
from torchtitan.models.dit_tts.run.messages import log_end, log_start
from torchtitan.models.dit_tts.run.resume_rules import trained_with
from torchtitan.models.dit_tts.run.rollback import save_bad_step
from torchtitan.models.dit_tts.run.run_folder import RunFolder
from torchtitan.models.dit_tts.run.teacher import build_teacher, distillation
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer
from torchtitan.models.dit_tts.validation.build import build_validator
from torchtitan.models.dit_tts.validation.history import best_row
from torchtitan.models.dit_tts.validation.validator import Validator
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer


class _LoopEnd(BaseException):
    """Ends upstream's loop of one process, behind which it sleeps 2 s for other ranks; `record`, which decorates that
    method, writes an error file for an Exception only."""


class DiTTTSTrainer(Trainer):
    """Trains `DiTTTSModel`.

    `config` is the run's resolved config; `job_config` is upstream's view of it, with the run folder in
    `dump_folder`. `train_step` counts the valid frames of all micro-batches, accumulates, clips and steps, as
    upstream's does, which waits for the device at every micro-batch. `forward_pass` adds the diffusion.
    """

    job_config: JobConfig
    dataloader: LatentDataLoader
    model_args: DiTTTSModelConfig
    metrics_processor: TTSMetricsProcessor
    optimizers: TTSOptimizers
    checkpointer: RunCheckpointer
    validator: Validator | None  # type: ignore[assignment]

    def __init__(self, config: JobConfig, run_folder: RunFolder, stop_signal: StopSignal):
        dp_degree = data_parallel_degree(config, int(os.environ["WORLD_SIZE"]))
        view = upstream_view(config, run_folder.path, dp_degree)
        # Upstream's checkpoint manager is replaced below; so configured it starts no thread and no group.
        checkpoint = view.checkpoint
        view.checkpoint = replace(checkpoint, async_mode="disabled", keep_latest_k=0)
        # Ours is built below, when there are averages to validate.
        validation = view.validation
        view.validation = replace(validation, enable=False)
        self.run_folder = run_folder
        super().__init__(view)
        view.checkpoint, view.validation = checkpoint, validation
        if self.parallel_dims.tp_enabled and not self.parallel_dims.fsdp_enabled:
            # Upstream would train in float32 here.
            dtype = TORCH_DTYPE_MAP[view.training.mixed_precision_param]
            self.maybe_enable_amp = torch.autocast(self.device.type, dtype)
        # Nothing changes it from here on; it is the run's config.toml.
        self.config = resolve(config, view.encoder.vocab_size, view.training.steps)
        self.benchmark: BenchmarkRecorder | None = None
        if config.benchmark.enable:
            model, metrics = self.model_parts[0], self.metrics_processor
            parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            self.benchmark = BenchmarkRecorder(
                self.config,
                self.model_args,
                parameters,
                metrics.peak,
                metrics.max_memory_gib,
            )
            text_encoder = build_random_encoder(view, self.device)
        else:
            text_encoder = build_frozen_encoder(view, self.device)
        if text_encoder is not None:
            compile_frozen(text_encoder, self.config)
        self.forward_pass = self.build_forward_pass(text_encoder)
        self.divergence = DivergenceGuard(config.divergence.spike_sigmas)
        self.rollbacks: Counter[int] = Counter()  # of each step that is saved
        self.ema = EMA(self.model_parts[0], config.ema.decays) if config.ema.enable else None
        self.checkpointer = RunCheckpointer(
            self.config,
            run_folder,
            self.ema,
            self._begin,
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self, "divergence": self.divergence},
        )
        self.validator = build_validator(
            self.config,
            view,
            self.forward_pass,
            self.ema,
            self.dataloader,
            self.parallel_dims,
            run_folder,
            self.metrics_processor,
            self.checkpointer,
            stop_signal,
        )
        self.step_ids: list[str] = []
        self.settled_ids: list[str] = []
        self.global_batch = self.lr_epoch = 0
        self.micro_batch = 0
        self.stop_signal = stop_signal
        self.stopped_by = 0
        self.progress = Progress()

    def build_forward_pass(self, text_encoder: PretrainedTextEncoder | None) -> ForwardPass:
        forward_pass = ForwardPass(
            self.job_config,
            self.model_parts[0],
            text_encoder,
            self.model_args.first_condition_id,
            self.loss_fn,
            self.device,
            self.maybe_enable_amp,
        )
        if self.job_config.distill.teacher:
            vocabulary = cast(ConditionedTokenizer, self.dataloader.tokenizer).vocabulary
            sizes = self.train_spec, self.model_args, self.job_config, vocabulary
            network = build_teacher(*sizes, self.parallel_dims, self.device)
            of_teacher = replace(forward_pass, model=network)
            forward_pass.teacher = Teacher(of_teacher, distillation(self.job_config))
        return forward_pass

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        self.ranks = gather_ranks()
        # Each machine has a command of its own, and looks by itself for what the run has saved.
        saved = checkpoint_steps(self.run_folder.path / self.job_config.checkpoint.folder)
        parts = {**trained_with(self.job_config), "list of saved steps": saved}
        assert_equal_across_ranks(parts, f"command and run folder {self.run_folder.path}")
        return dims

    def _begin(self) -> None:
        """Brings the run folder to the loaded step."""
        name = self.metrics_processor.device_memory_monitor.device_name
        devices = f"{self.parallel_dims.world_size} x {name}"
        log_start(self.checkpointer, self.model_parts[0], self.step, self.device, devices)
        self.run_folder.confirm(self.config)
        self.run_folder.write_ranks(self.ranks)
        self._continue_from_step()
        self.stop_signal.arm(timedelta(seconds=self.config.comm.init_timeout_seconds))
        # An earlier start may have ended between a step's checkpoint and its validation.
        if self.validator is not None and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)

    def _continue_from_step(self) -> None:
        self.run_folder.resume_at(self.step)
        # All ranks use rank 0's rows, which decide the checkpoints that are kept.
        rank = self.run_folder.rank
        rows = gather_from_ranks(self.run_folder.validation.read() if rank == 0 else [])[0]
        best = best_row(rows, self.config.validation.keep_best)
        self.checkpointer.best_step = None if best is None else best["step"]
        if self.validator is not None:
            self.validator.rows = rows
        self.metrics_processor.skipped_batches = len(self.dataloader.skipped)
        self.metrics_processor.start(self.step, self.run_folder.path, self.run_folder.metrics)
        self.run_folder.set_state("running", self.step)

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Any], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Upstream's, with asynchronous copies to the device. Metrics count each micro-batch while it is on
        the CPU; `valid_frames` is the number of frames in its loss."""
        config = self.job_config
        on_padding = config.objective.loss_on_padding
        # Not trimmed: a compiled graph has one shape, a benchmark times each bucket, padding may be trained on,
        # and views are not copied to a GPU from pinned memory.
        static = config.compile.enable or config.benchmark.enable or on_padding
        trims = self.device.type == "cpu" and not static
        batches: Iterator[Any] = super().batch_generator(data_iterable)
        for batch, labels in batches:
            if trims and "longest" not in batch:
                labels = trim_padding(batch, labels)
            batch["valid_frames"] = labels.numel() if on_padding else int(batch["frames"].sum())
            rows = self.forward_pass.text_rows(batch)
            micro_batch = measure(batch, rows)
            self.metrics_processor.count(micro_batch, batch["replaced"])
            if self.benchmark is not None:
                self.benchmark.count(micro_batch)
            self.step_ids.extend(batch["sample_id"])
            self.global_batch = int(batch["global_batch"])
            batch = self.forward_pass.to_device(batch, rows)
            yield batch, labels

    def forward_backward_step(
        self, *, input_dict: dict[str, Any], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """One micro-batch. Returns this rank's part of the loss: its sum over valid frames divided by the
        valid frames of the global batch."""
        self.micro_batch += 1
        begin_micro_batch(
            self.model_parts[0],
            self.parallel_dims,
            self.job_config.parallelism,
            last=self.micro_batch == self.gradient_accumulation_steps,
        )
        with self.train_context():
            loss = self.forward_pass.loss_sum(input_dict) / global_valid_tokens
            self.metrics_processor.compiles = compiled_graphs()
            self._mark("forward")
            loss.backward()
            self._mark("backward")
        return loss

    def should_continue_training(self) -> bool:
        more = self._should_continue()
        if not more and self.parallel_dims.world_size == 1:
            raise _LoopEnd
        return more

    def _should_continue(self) -> bool:
        self.stopped_by = self.stop_signal.agreed()
        if self.stopped_by:
            self._settle(self.divergence.read())
            self.checkpointer.save_now(self.step)
            return False
        return super().should_continue_training()

    def train(self) -> None:
        with suppress(_LoopEnd):
            super().train()
        if self.benchmark is not None:
            self._settle(self.divergence.read())  # the loss of the last step
        self.checkpointer.finish()
        if self.step > self.metrics_processor.first_step:
            log_end(self.checkpointer, self.step)

    def close(self) -> None:
        self.dataloader.close()
        super().close()

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """One step of the optimizer. Its values are read in the next step, and copies to the device come from
        pinned memory: so the host stays ahead, and the device does not wait for it."""
        self.step_ids = []
        self.micro_batch = 0
        self.progress.at(self.step, 0)
        should_log = self.metrics_processor.should_log(self.step)
        with self.benchmark.step(self.step) if self.benchmark is not None else nullcontext():
            lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
            graphs = graphed_components(self.job_config) - {"text_encoder"}
            self.optimizers.zero_grad(
                set_to_none=not (graphs and self.gradient_accumulation_steps > 1)
            )
            micro_batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
            self.progress.at(self.step, 1)
            valid_frames = self._valid_frames(micro_batches)
            self._mark("data")
            losses = []
            for batch, labels in micro_batches:
                loss = self.forward_backward_step(
                    input_dict=batch, labels=labels, global_valid_tokens=valid_frames
                )
                losses.append(loss.detach())
            grad_norm = gradient_norm(self.model_parts[0].parameters())
            loss = sum_over_samples(torch.stack(losses).sum(), self.parallel_dims)
            self.checkpointer.maybe_wait_for_staging()
            if self._settle(self.divergence.read()):
                return  # the step before was bad: this one is repeated
            self.settled_ids = self.step_ids
            self.lr_epoch = self.lr_schedulers.schedulers[0].last_epoch
            everyone = dist.group.WORLD if self.parallel_dims.world_size > 1 else None
            bad = self.divergence.judge(self.step, self.global_batch, loss, grad_norm, everyone)
            self.optimizers.step_unless(bad, grad_norm, self.job_config.training.max_norm)
            self.lr_schedulers.step()
            self._mark("optimizer")
            if should_log:
                self.metrics_processor.collect(self.step, lr)
                if self.metrics_processor.logs_at_once(self.step):
                    if self._settle(self.divergence.read()):
                        return
                    self._mark("optimizer")
        if should_log:
            self.run_folder.set_state("running", self.step)
        if 1 < self.step == self.metrics_processor.first_step + 1:
            # Upstream sets it after step 1, which a resumed run skips.
            limit = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(limit, self.parallel_dims)

    def _mark(self, part: str) -> None:
        """Marks the end of a part of the step, for a benchmark."""
        if self.benchmark is not None:
            self.benchmark.mark(part)

    def _settle(self, stats: StepStats | None) -> bool:
        """Ends a step once its stats are known. A bad step, which the optimizer has skipped, is undone, and its
        batch is skipped. If bad steps pile up, the weights are the cause, and the run goes back to its last
        checkpoint. Returns whether the run has gone back.
        """
        if stats is None:
            return False
        if self.benchmark is not None:
            self.benchmark.loss = stats.loss
        self.metrics_processor.log(stats)
        if stats.bad:
            self._undo(stats)
            return True
        if self.ema is not None:
            self.ema.update()
        if self.job_config.data.audit and is_first_copy(self.parallel_dims):
            self.run_folder.audit.append({"step": stats.step, "ids": self.settled_ids})
        return False

    def _undo(self, bad: StepStats) -> None:
        kept = save_bad_step(self.run_folder.path, self.dataloader, bad)
        limits, loader = self.config.divergence, self.dataloader
        if self.benchmark is None and self.divergence.bad_recently <= limits.max_bad_steps:
            loader.go_to(bad.global_batch)
            loader.skipped.add(bad.global_batch)
            self.step = bad.step - 1
            self.lr_schedulers.load_state_dict({"last_epoch": self.lr_epoch})
            self.metrics_processor.skipped_batches = len(loader.skipped)
            done = f"the step is undone and its batch skipped; see {kept}"
        else:
            self._roll_back(bad, kept)
            done = (
                f"too many bad steps, so the run continues from step {self.step} and skips the batches "
                f"since; see {kept.parent}"
            )
        if self.run_folder.rank == 0:
            logger.error(f"{bad}: {done}")

    def _roll_back(self, bad: StepStats, kept: Path) -> None:
        self.checkpointer.wait()
        loader, skipped = self.dataloader, self.dataloader.skipped
        saved, limit = self.checkpointer.saved_step, self.config.divergence.max_rollbacks
        self.rollbacks[saved] += 1
        if saved > 0 and self.rollbacks[saved] > limit:
            raise InputError(
                f"{bad}: too many bad steps, after {limit} rollbacks to step {saved}; lower [optimizer] lr, look at the "
                f"batches in {kept.parent}, or rename the checkpoint of step {saved}, and the run continues from the one "
                f"before it"
            )
        if not self.checkpointer.roll_back():
            raise InputError(
                f"{bad}: too many bad steps, and no checkpoint of this start to roll back to; lower "
                f"[optimizer] lr, or look at the batches in {kept.parent}"
            )
        loader.skipped = skipped.union(range(loader.global_batch, bad.global_batch + 1))
        self.divergence.recent.clear()
        self._continue_from_step()

    def _valid_frames(
        self, micro_batches: list[tuple[dict[str, Any], torch.Tensor]]
    ) -> torch.Tensor:
        """Number of valid frames of a step's micro-batches on all ranks, int64."""
        count = sum(batch["valid_frames"] for batch, _ in micro_batches)
        frames = torch.full((), count, dtype=torch.int64, device=self.device)
        return sum_over_samples(frames, self.parallel_dims)
