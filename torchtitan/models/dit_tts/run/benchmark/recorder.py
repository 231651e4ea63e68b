"""Times the trainer's steps and writes benchmark.json: the results and everything needed to repeat them."""

import itertools
import json
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
from torchtitan.models.dit_tts.errors import without_secrets
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.collectives import gather_from_ranks
from torchtitan.models.dit_tts.infra.compile import compiled_graphs
from torchtitan.models.dit_tts.infra.device_time import moment, seconds_between
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import MicroBatch
from torchtitan.models.dit_tts.run.benchmark import figures
from torchtitan.models.dit_tts.run.factors import factors
from torchtitan.models.dit_tts.run.run_folder import environment, gpus_per_node

FILE_NAME = "benchmark.json"


class BenchmarkRecorder:
    """Records seconds and sizes of one rank's steps after the warm-up.

    Args:
        parameters: number of trained parameters of the model, over all ranks.
        peak: dense bf16 peak of a device in FLOP/s, or None.
        max_memory_gib: this rank's maximum of (allocated, reserved) memory so far.
    """

    def __init__(
        self,
        job_config: JobConfig,
        model_args: DiTTTSModelArgs,
        parameters: int,
        peak: float | None,
        max_memory_gib: Callable[[], tuple[float, float]],
    ):
        self.job_config = job_config
        self.model_args = model_args
        self.parameters = parameters
        self.warm_up_steps = job_config.training.steps - job_config.benchmark.steps
        self.peak = peak
        self.max_memory_gib = max_memory_gib
        self.steps: list[list[MicroBatch]] = []
        self._timed: list[list[tuple[str, Any]]] = []
        """marks of each timed step, from the end of the step before"""
        self.loss: float | None = None
        """of the last step that was read"""
        self._batches: list[MicroBatch] = []
        self._marks: list[tuple[str, Any]] = []
        self._graphs = self._compiles = 0

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
        self._batches = []
        if not self._marks:
            self.mark("")
        yield
        self.mark("")
        marks, self._marks = self._marks, self._marks[-1:]
        if number > self.warm_up_steps:
            self._timed.append(marks)
            self.steps.append(self._batches)
            self._compiles = compiled_graphs() - self._graphs
        elif number == self.warm_up_steps:
            self._graphs = compiled_graphs()

    def seconds(self) -> tuple[list[float], list[dict[str, float]]]:
        """Return the seconds of each timed step, and of its parts. Waits for the device."""
        utils.device_module.synchronize()
        parts = []
        for marks in self._timed:
            parts.append(dict.fromkeys((*figures.PARTS, ""), 0.0))
            for (_, begin), (part, end) in itertools.pairwise(marks):
                parts[-1][part] += seconds_between(begin, end)
        return [sum(each.values()) for each in parts], parts

    def recording(self) -> figures.Recording:
        """The record of this rank."""
        config, args = self.job_config, self.model_args
        allocated, reserved = self.max_memory_gib()
        seconds, parts = self.seconds()

        batches = [batch for step in self.steps for batch in step]
        known = figures.repeats_are_known(config)
        return figures.Recording(
            seconds=seconds,
            parts=parts,
            flops=np.array(figures.counted_flops(args, self.parameters, batches), float),
            repeated=sum(figures.repeated_by(config, args, batch) for batch in batches)
            if known
            else None,
            samples=sum(len(batch.lengths) for batch in batches),
            valid=np.sum([np.sum(batch.lengths, axis=0) for batch in batches], axis=0),
            padded=np.sum(
                [batch.shape[0] * np.array(batch.shape[1:]) for batch in batches], axis=0
            ),
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
        seconds = np.max([rank.seconds for rank in ranks], axis=0).tolist()
        total = sum(seconds)

        def over_ranks(name: str) -> Any:
            """Those of tensor parallelism have the same samples, which count once."""
            sums = np.sum([getattr(rank, name) for rank in ranks], axis=0)
            return sums / config.parallelism.tensor_parallel_degree

        flops, valid = over_ranks("flops"), over_ranks("valid")
        tflops = flops / total / gpus / 1e12
        peak = self.peak and self.peak / 1e12
        mfu = [peak and rate / peak for rate in tflops.tolist()]
        hfu = None
        if self.peak and all(rank.repeated is not None for rank in ranks):
            hfu = float(flops[0] + over_ranks("repeated")) / total / gpus / self.peak
        padding = (1 - valid / over_ranks("padded")).tolist()
        return {
            "run_name": config.job.experiment,
            "factors": factors(asdict(config), gpus, in_node),
            "seconds_per_step": figures.spread(seconds),
            "steps": len(seconds),
            "warm_up_steps": self.warm_up_steps,
            "timed_seconds": total,
            "samples_per_second": float(over_ranks("samples")) / total,
            "audio_seconds_per_second": float(valid[0]) / config.data.frames_per_second / total,
            **dict(zip(figures.PADDING, padding)),
            **dict(zip(figures.MFU, mfu, strict=True)),
            "hfu": hfu,
            "tflops_per_device": float(tflops[0]),
            "goodput_tflops_per_device": float(tflops[1]),
            "loss": self.loss,
            "step_split": figures.step_split(ranks),
            "attention": figures.attention_backend(config),
            "peak_tflops": peak,
            "peak_allocated_gib": max(rank.peak_allocated_gib for rank in ranks),
            "peak_reserved_gib": max(rank.peak_reserved_gib for rank in ranks),
            "compiles_while_timed": max(rank.compiles for rank in ranks),
            "gpus": gpus,
            "gpus_per_node": in_node,
            "parameters": self.parameters,
            "step_seconds": seconds,
            "environment": environment(),
            "config": without_secrets(asdict(config)),
        }
