"""Times the trainer's steps and writes benchmark.json: the results and everything needed to repeat them."""

import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy
from torchtitan.models.dit_tts.errors import without_secrets
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.collectives import gather_from_ranks
from torchtitan.models.dit_tts.infra.compile import compiled_graphs
from torchtitan.models.dit_tts.infra.device_time import moment, seconds_between
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import MicroBatch
from torchtitan.models.dit_tts.run.benchmark import figures
from torchtitan.models.dit_tts.run.benchmark.loader import OPEN_END, warm_up_steps
from torchtitan.models.dit_tts.run.factors import factors
from torchtitan.models.dit_tts.run.run_folder import environment, gpus_per_node

FILE_NAME = "benchmark.json"


class BenchmarkRecorder:
    """Records seconds and sizes of one rank's steps after the warm-up.

    Args:
        parameters: number of trained parameters of the model, over all ranks.
        loader: of `build_synthetic_dataloader`.
        peak: dense bf16 peak of a device in FLOP/s, or None.
        max_memory_gib: this rank's maximum of (allocated, reserved) memory so far.
    """

    def __init__(
        self,
        job_config: JobConfig,
        model_args: DiTTTSModelArgs,
        parameters: int,
        loader: LatentDataLoader,
        peak: float | None,
        max_memory_gib: Callable[[], tuple[float, float]],
    ):
        self.job_config = job_config
        self.model_args = model_args
        self.parameters = parameters
        self.warm_up_steps = warm_up_steps(loader.order, job_config.benchmark)
        policy, blocks = loader.policy, loader.dp_world_size * loader.accumulation_steps
        # The rows of a packed micro-batch are one.
        rows = policy.batch_sizes[0] // blocks if isinstance(policy, PackedPolicy) else 1
        frames = [rows * edge for edge in policy.edges]
        often = loader.order.bucket_batches_per_epoch
        self.batches_per_epoch = dict(zip(frames, often, strict=True))
        self.peak = peak
        self.max_memory_gib = max_memory_gib
        self.steps: list[list[MicroBatch]] = []
        self._timed: list[list[tuple[str, Any]]] = []
        """marks of each timed step, from the end of the step before"""
        self._host_seconds: list[float] = []
        self.loss: float | None = None
        """of the last step that was read"""
        self._batches: list[MicroBatch] = []
        self._marks: list[tuple[str, Any]] = []
        self._graphs = self._compiles = 0
        self._began = 0.0

    def count(self, batch: MicroBatch) -> None:
        """Adds a micro-batch of the current step."""
        self._batches.append(batch)

    def mark(self, part: str) -> None:
        """Assigns the time since the last mark to this part of the step. The host does not
        wait for the device."""
        self._marks.append((part, moment()))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Times step `number` (from 1) from the end of the step before. As in training, the host does not wait
        for the device: its work on a step overlaps with the device's on the last one."""
        began = time.perf_counter()
        self._batches = []
        if not self._marks:
            self.mark("")
        yield
        self.mark("")
        marks, self._marks = self._marks, self._marks[-1:]
        if number > self.warm_up_steps:
            self._timed.append(marks)
            self._host_seconds.append(time.perf_counter() - began)
            self.steps.append(self._batches)
            self._compiles = compiled_graphs() - self._graphs
        elif number == self.warm_up_steps:
            self._graphs = compiled_graphs()
            self._began = time.perf_counter()

    def seconds(self) -> tuple[list[float], list[dict[str, float]]]:
        """Of each timed step, and of its parts. Waits for the device."""
        utils.device_module.synchronize()
        parts = []
        for marks in self._timed:
            parts.append(dict.fromkeys((*figures.PARTS, ""), 0.0))
            for (_, begin), (part, end) in itertools.pairwise(marks):
                parts[-1][part] += seconds_between(begin, end)
        return [sum(each.values()) for each in parts], parts

    def remaining_steps(self, step: int, group: dist.ProcessGroup | None = None) -> int:
        """Number of steps after `step` as far as it is known: the warm-up, then [benchmark] steps, or as many as fit
        into the rest of duration_seconds at the median speed. Rank 0 decides for all, by gloo: NCCL would wait for
        devices."""
        benchmark = self.job_config.benchmark
        if step <= self.warm_up_steps:
            return self.warm_up_steps + (benchmark.steps or 1) - step
        left = max(0, self.warm_up_steps + (benchmark.steps or OPEN_END) - step)
        if benchmark.duration_seconds:
            time_left = benchmark.duration_seconds - (time.perf_counter() - self._began)
            left = min(left, max(0, int(np.ceil(time_left / np.median(self._host_seconds)))))
            left = gather_from_ranks(left, group)[0]
        return left

    def recording(self) -> figures.Recording:
        """The record of this rank."""
        config, args = self.job_config, self.model_args
        allocated, reserved = self.max_memory_gib()
        seconds, parts = self.seconds()

        def of_steps(value: Any) -> list[Any]:
            return [sum(map(value, step)) for step in self.steps]

        return figures.Recording(
            seconds=seconds,
            parts=parts,
            flops=[figures.flops_by_convention(args, self.parameters, step) for step in self.steps],
            repeated=of_steps(lambda batch: figures.repeated_by(config, args, batch))
            if figures.repeats_are_known(config)
            else None,
            samples=of_steps(lambda batch: len(batch.lengths)),
            valid=of_steps(lambda batch: np.sum(batch.lengths, axis=0)),
            padded=of_steps(lambda batch: batch.shape[0] * np.array(batch.shape[1:])),
            peak_allocated_gib=allocated,
            peak_reserved_gib=reserved,
            compiles=self._compiles,
        )

    def finish(self, folder: Path) -> dict[str, Any] | None:
        """Gathers the results of all ranks and writes benchmark.json to the run's folder. Returns
        the report on rank 0; None on the others, and where the run was stopped before it was timed.
        """
        if not self.steps:
            return None
        ranks = gather_from_ranks(self.recording())
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        report = self._report(ranks)
        write_atomic(folder / FILE_NAME, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        for line in figures.summary(report):
            logger.info(line)
        return report

    def _report(self, ranks: list[figures.Recording]) -> dict[str, Any]:
        config = self.job_config
        gpus, in_node = len(ranks), gpus_per_node()
        copies = config.parallelism.tensor_parallel_degree
        steps = figures.totals(ranks, copies, config.data.frames_per_second)
        seconds, total = steps.seconds.tolist(), float(steps.seconds.sum())
        rows = figures.convention_table(steps.flops.sum(1).tolist(), total, gpus, self.peak)
        hardware = None if steps.hardware is None else float(steps.hardware.sum()) / total / gpus
        frames = [step[0].shape[1] for step in self.steps]
        return {
            "run_name": config.job.experiment,
            "factors": factors(asdict(config), gpus, in_node),
            "seconds_per_step": figures.spread(seconds),
            "steps": len(seconds),
            "warm_up_steps": self.warm_up_steps,
            "timed_seconds": total,
            "samples_per_second": float(steps.samples.sum()) / total,
            "audio_seconds_per_second": float(steps.audio_seconds.sum()) / total,
            **steps.padding,
            "mfu": rows[0]["mfu"],
            "goodput_mfu": rows[1]["mfu"],
            "hfu": self.peak and hardware and hardware / self.peak,
            "tflops_per_device": rows[0]["tflops_per_device"],
            "hardware_tflops_per_device": hardware and hardware / 1e12,
            "conventions": rows,
            "weighted": figures.weighted(steps, frames, self.batches_per_epoch, gpus, self.peak)
            if config.benchmark.lengths == "mixed"
            else None,
            "loss": self.loss,
            "step_split": figures.step_split(ranks),
            "attention": figures.attention_backend(config),
            "peak_tflops": self.peak and self.peak / 1e12,
            "peak_allocated_gib": max(rank.peak_allocated_gib for rank in ranks),
            "peak_reserved_gib": max(rank.peak_reserved_gib for rank in ranks),
            "compiles_while_timed": max(rank.compiles for rank in ranks),
            "gpus": gpus,
            "gpus_per_node": in_node,
            "parameters": self.parameters,
            "shapes": self._shapes(seconds),
            "step_seconds": seconds,
            "environment": environment(),
            "config": without_secrets(asdict(config)),
        }

    def _shapes(self, seconds: list[float]) -> list[dict[str, Any]]:
        """Each step's micro-batches have one shape, the same on every rank."""
        by_shape: dict[tuple[int, ...], list[float]] = defaultdict(list)
        batches: Counter[tuple[int, ...]] = Counter()
        samples: Counter[tuple[int, ...]] = Counter()
        for step_seconds, step in zip(seconds, self.steps, strict=True):
            by_shape[step[0].shape].append(step_seconds)
            batches[step[0].shape] += len(step)
            samples[step[0].shape] += sum(len(batch.lengths) for batch in step)
        names = ("frames", "text_tokens", "speaker_frames")
        return [
            {
                "samples": samples[shape] // batches[shape],  # of a packed batch in the mean
                **dict(zip(names, shape[1:], strict=True)),
                "steps": len(times),
                "micro_batches": batches[shape],
                "seconds_per_step": figures.spread(times),
            }
            for shape, times in sorted(by_shape.items(), key=lambda item: item[0][1])
        ]
