"""The trainer: upstream's, with the flow-matching step, EMA, audit and the run's folder."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.dit_tts.benchmark.loader import build_random_encoder
from torchtitan.models.dit_tts.benchmark.recorder import BenchmarkRecorder
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import build_objective
from torchtitan.models.dit_tts.infra.compile import (
    CompileWatch,
    compile_function,
    static_shapes,
)
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.optimizer import same_optimizer_as_saved
from torchtitan.models.dit_tts.infra.parallelize import reduce_gradients
from torchtitan.models.dit_tts.infra.text_encoder import build_frozen_encoder
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.model.flops import MicroBatch
from torchtitan.models.dit_tts.run_folder import RunFolder
from torchtitan.models.dit_tts.text.build_tokenizer import origin_of_weights
from torchtitan.models.dit_tts.text.encoder_record import check_mode
from torchtitan.models.dit_tts.text.hf_encoder import find_source, is_pretrained
from torchtitan.models.dit_tts.text.packing import TextRows
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.train import Trainer


class DiTTTSTrainer(Trainer):
    """Trains `DiTTTSModel`. `job_config.job.dump_folder` is the run's own folder, `run_folder`.

    `train_step` does what upstream's does, which waits for the device at every micro-batch: it counts
    the valid frames of all micro-batches, accumulates, clips and steps. What diffusion adds is
    `forward_backward_step`.
    """

    job_config: JobConfig
    metrics_processor: TTSMetricsProcessor

    def __init__(self, job_config: JobConfig, run_folder: RunFolder):
        super().__init__(job_config)
        # [data] epochs has decided it by now; the run's config.toml is to say so.
        run_folder.config.training.steps = job_config.training.steps
        self.benchmark = self._build_benchmark() if job_config.benchmark.enable else None
        if self.benchmark is not None:
            self.text_encoder = build_random_encoder(job_config, self.parallel_dims, self.device)
        else:
            self.text_encoder = build_frozen_encoder(
                job_config, self.parallel_dims, self.dataloader.features, self.device
            )
        self._build_objective()
        self.ema = EMA(self.model_parts[0], job_config.ema.decay) if job_config.ema.enable else None
        if self.ema is not None and self.checkpointer.enable:
            self.checkpointer.states["ema"] = self.ema
        self.compile_watch = CompileWatch(self.model_parts[0], job_config.compile.components)
        self.run_folder = run_folder
        self.step_ids: list[str] = []
        self.micro_batch = 0
        self._leave_text_encoder_out_of_loading()
        self._load = self.checkpointer.load
        self.checkpointer.load = self._load_checkpoint

    def _build_benchmark(self) -> BenchmarkRecorder:
        parameters = sum(p.numel() for p in self.model_parts[0].parameters() if p.requires_grad)
        return BenchmarkRecorder(
            self.job_config,
            self.model_args,
            parameters,
            len(self.dataloader.order.warm_up),
            self.metrics_processor.peak,
        )

    def _build_objective(self) -> None:
        config = self.job_config
        self.add_noise = build_objective(config).add_noise
        if config.compile.enable and "loss" in config.compile.components:
            backend, shapes = config.compile.backend, static_shapes(config.data)
            self.add_noise = compile_function(self.add_noise, backend, shapes)
            self.loss_fn = compile_function(self.loss_fn, backend, shapes)

    def _leave_text_encoder_out_of_loading(self) -> None:
        """Where a run that trains its text encoder starts from the weights of one that did not, the
        encoder keeps its pretrained weights."""
        config, folder = self.job_config, self.run_folder.path
        origin = origin_of_weights(config, folder)
        if origin is None or not is_pretrained(config.encoder.model):
            return
        source = find_source(config.encoder.model, folder=folder)
        model_only = config.checkpoint.initial_load_model_only
        if check_mode(origin, source, config.encoder, origin == folder, model_only):
            load = self.checkpointer.dcp_load

            def load_without(state_dict: dict[str, Any], **options: Any) -> None:
                kept = {k: v for k, v in state_dict.items() if not k.startswith("text_encoder.")}
                load(kept, **options)

            self.checkpointer.dcp_load = load_without

    def _load_checkpoint(self, step: int = -1) -> bool:
        """Loads as upstream does, then brings the run's folder to the step that was loaded."""
        self._remove_unfinished_checkpoints()
        self._refuse_to_lose_steps(step)
        with same_optimizer_as_saved(self.job_config.optimizer):
            loaded = self._load(step=step)
        self.run_folder.confirm()
        self.run_folder.resume_at(self.step)
        self.metrics_processor.start(
            self.step, str(self.run_folder.path / "tb"), self.run_folder.metrics
        )
        self.run_folder.set_state("running", self.step)
        return loaded

    def _remove_unfinished_checkpoints(self) -> None:
        """A kill during a save leaves a step folder without its metadata. Upstream would count it
        among the latest to keep, and a run's first one would hide initial_load_path."""
        checkpointer = self.checkpointer
        if not checkpointer.enable or checkpointer.load_only:
            return
        if torch.distributed.get_rank() == 0 and os.path.isdir(checkpointer.folder):
            for path in Path(checkpointer.folder).glob("step-*"):
                if not (path / ".metadata").is_file() and not list(path.glob("*.safetensors*")):
                    shutil.rmtree(path)
            if not os.listdir(checkpointer.folder):
                os.rmdir(checkpointer.folder)
        torch.distributed.barrier()

    def _refuse_to_lose_steps(self, step: int) -> None:
        """Raises InputError where going on would overwrite what an earlier life of the run made."""
        checkpointer = self.checkpointer
        if not checkpointer.enable or checkpointer.load_only:
            last = max((row["step"] for row in self.run_folder.metrics.read()), default=0)
            if last:
                raise InputError(
                    f"{self.run_folder.path} already holds a run's metrics up to step {last}, which a "
                    f"run that does not go on from its checkpoints would overwrite; give another "
                    f"[job] experiment or remove the folder"
                )
            return
        newest = checkpointer._find_load_step()
        if step != -1 and step != newest:
            raise InputError(
                f"[checkpoint] load_step = {step}, but the newest checkpoint in {checkpointer.folder} is "
                f"step {newest}, and training from an older one would overwrite it; give a new [job] "
                f"experiment with [checkpoint] initial_load_path = .../step-{step} and "
                f"initial_load_model_only = false"
            )

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Any], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Upstream's, with micro-batches that are on their way to the device. Takes note of each while
        it is still on the CPU: `valid_frames` is how many frames its loss is a sum over."""
        on_padding = self.job_config.objective.loss_on_padding
        for batch, labels in super().batch_generator(data_iterable):
            batch["valid_frames"] = (
                labels.numel() if on_padding else int((labels != IGNORE_INDEX).sum())
            )
            rows = self._text_rows(batch)
            samples, frames, _ = batch["latents"].shape
            lengths = (batch["frames"], batch["text_mask"].sum(1), batch["speaker_mask"].sum(1))
            micro_batch = MicroBatch(
                (samples, frames, batch["text_ids"].shape[1], batch["speaker"].shape[1]),
                list(zip(*(each.tolist() for each in lengths), strict=True)),
                rows.shapes if rows is not None else (),
            )
            self.metrics_processor.count(micro_batch, batch["replaced"])
            if self.benchmark is not None:
                self.benchmark.count(micro_batch)
            batch["text_rows"] = rows.to(self.device) if rows is not None else None
            self.step_ids.extend(batch["sample_id"])
            # The host does not wait for the copies, which are from pinned memory.
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    batch[name] = value.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            yield batch, torch.zeros_like(labels) if on_padding else labels

    def _text_rows(self, batch: dict[str, Any]) -> TextRows | None:
        """How the batch's texts go through a pretrained encoder, inside the model or beside it."""
        encoder = self.text_encoder or self.model_parts[0].text_encoder
        if not isinstance(encoder, PretrainedTextEncoder):
            return None
        in_text = batch["text_mask"] & (batch["text_ids"] < self.model_args.condition_base)
        return encoder.rows(in_text.numpy())

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, Any],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """One micro-batch. Returns this rank's part of the loss: its sum over valid frames divided
        by the number of valid frames in the whole global batch."""
        self.micro_batch += 1
        reduce_gradients(
            self.model_parts[0],
            self.parallel_dims,
            now=self.micro_batch == self.gradient_accumulation_steps,
        )
        with self.train_context():
            with self.compile_watch.forward_pass(len(self.metrics_processor.shapes)):
                loss = self._loss_sum(input_dict, labels) / global_valid_tokens
            self.metrics_processor.compiles = self.compile_watch.graphs
            loss.backward()
        return loss

    def _loss_sum(self, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch, summed over its valid frames."""
        frame_mask = labels != IGNORE_INDEX
        features = batch.get("text_features")
        with torch.no_grad():
            if self.text_encoder is not None:
                features = self.text_encoder(
                    batch["text_ids"], batch["text_mask"], batch["text_rows"]
                )
            noisy = self.add_noise(
                batch["latents"], batch["global_batch"], batch["row"], batch["global_batch_size"]
            )
        with self.maybe_enable_amp:
            prediction = self.model_parts[0](
                noisy.latents,
                noisy.t,
                frame_mask,
                batch["text_ids"],
                batch["text_mask"],
                batch["speaker"],
                batch["speaker_mask"],
                noisy.keep_text,
                noisy.keep_speaker,
                features,
                batch["text_rows"],
            )
            return self.loss_fn(prediction, noisy.target, frame_mask)

    def should_continue_training(self) -> bool:
        if self.benchmark is not None:
            # A benchmark's end may be a duration; progress and ETA are then an estimate.
            self.job_config.training.steps = self.step + self.benchmark.remaining_steps(self.step)
        return super().should_continue_training()

    def close(self) -> None:
        self.dataloader.close()
        super().close()

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """One step of the optimizer.

        Only where it is logged is a value read from the device, and nothing is copied to it from memory
        that is not pinned: so the host stays ahead, and the device does not wait for it.
        """
        self.step_ids = []
        self.micro_batch = 0
        should_log = self.metrics_processor.should_log(self.step)
        with self.benchmark.step(self.step) if self.benchmark is not None else nullcontext():
            lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
            self.optimizers.zero_grad()
            micro_batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
            valid_frames = self._valid_frames(micro_batches)
            losses = [
                self.forward_backward_step(
                    input_dict=batch, labels=labels, global_valid_tokens=valid_frames
                ).detach()
                for batch, labels in micro_batches
            ]
            grad_norm = dist_utils.clip_grad_norm_(
                self.model_parts[0].parameters(), self.job_config.training.max_norm, foreach=True
            )
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            if should_log:
                self._log(torch.stack(losses).sum(), grad_norm, lr)
            if self.ema is not None:
                self.ema.update()
        if self.job_config.data.audit:
            self.run_folder.audit.append({"step": self.step, "ids": self.step_ids})
        if should_log:
            self.run_folder.set_state("running", self.step)

    def _valid_frames(
        self, micro_batches: list[tuple[dict[str, Any], torch.Tensor]]
    ) -> torch.Tensor:
        """Valid frames of a step's micro-batches on all ranks, int64. The sum stays on the device, since
        the host would have to wait for it."""
        count = sum(batch["valid_frames"] for batch, _ in micro_batches)
        frames = torch.full((), count, dtype=torch.int64, device=self.device)
        if self.parallel_dims.dp_enabled:
            group = self.parallel_dims.get_mesh("batch").get_group()
            torch.distributed.all_reduce(frames, group=group)
        return frames

    def _log(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        lr: float | torch.Tensor,
    ) -> None:
        """Logs a step, for which the host waits. `loss` is this rank's part of it."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        self.metrics_processor.log_step(
            self.step, dist_utils.dist_sum(loss, mesh), grad_norm.item(), lr
        )


def set_single_process_defaults() -> None:
    """Lets `python train.py` run without torchrun, as the only process of its group."""
    if "RANK" in os.environ:
        return
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
