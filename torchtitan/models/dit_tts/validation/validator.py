"""Validation while a run trains: held-out loss of the weights and of their averages, and speech samples."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.validation_figures import FIGURES, prefix
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.stop_signal import Stopped
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.run.run_folder import RunFolder
from torchtitan.models.dit_tts.validation.heldout_loss import HeldoutLoss, figures
from torchtitan.models.dit_tts.validation.history import RAW, best_row, weights_name
from torchtitan.models.dit_tts.validation.speech_samples import SpeechSamples
from torchtitan.tools.logging import logger


@dataclass(eq=False)
class Validator:
    """The validator, which upstream's training loop calls after each step."""

    config: JobConfig
    model: nn.Module
    ema: EMA | None
    loss: HeldoutLoss
    samples: SpeechSamples | None
    run_folder: RunFolder
    metrics: TTSMetricsProcessor
    keep: Callable[[int], None]
    """called with the step whose weights are the best so far; saves them and keeps them"""

    ready: Callable[[], None]
    """called before the weights are exchanged: nothing may be copying them any more"""

    rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    """of validation.jsonl up to the present step"""

    def due(self, step: int) -> tuple[bool, bool]:
        """True if the loss is still to be measured after a step, and samples to be made."""
        last, freq = step == self.config.training.steps, self.config.samples.freq
        # A step may end twice, if the one after it is undone; and a run may end between two rows.
        measured, spoken = (
            any(row["step"] == step and figure in row for row in self.rows)
            for figure in ("heldout_loss", "real_time_factor")
        )
        measure = not measured and (last or step % self.config.validation.freq == 0)
        speak = self.samples is not None and (last or step % freq == 0)
        return measure, speak and not spoken

    def should_validate(self, step: int) -> bool:
        return step > 0 and any(self.due(step))

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """A collective. What it measures is the same on every rank. A signal leaves what is not measured by then to the
        run's next start."""
        began = time.perf_counter()
        self.ready()
        measure, speak = self.due(step)
        with suppress(Stopped), _undisturbed(self.model):
            if measure:
                self._record(self._measure_loss(), step, began)
            if speak and self.samples is not None:
                self._make_samples(self.samples, step)
        self.metrics.exclude_time(time.perf_counter() - began)
        best = best_row(self.rows, self.config.validation.keep_best)
        if best is not None and best["step"] == step:
            self.keep(step)

    @contextmanager
    def _weights(self, name: str) -> Iterator[None]:
        """The model has the weights of that name."""
        if name == RAW:
            yield
            return
        assert self.ema is not None
        decay = next(d for d in self.ema.averages if weights_name(prefix(d)) == name)
        with self.ema.in_place_of_weights(decay):
            _forget_gathered(self.model)
            yield
        _forget_gathered(self.model)

    @property
    def names(self) -> list[str]:
        """Names of the raw weights, then of each EMA, fastest decay first."""
        decays = sorted(self.ema.averages) if self.ema is not None else []
        return [RAW, *(weights_name(prefix(decay)) for decay in decays)]

    def _measure_loss(self) -> dict[str, Any]:
        measured, plain = {}, self.names[-1]
        for name in self.names:
            with self._weights(name):
                measured[name] = self.loss.measure(gains=name == plain)
        row = figures(measured, self.config.validation.times, plain)
        return {**row, "samples": len(self.loss.sets["heldout_loss"])}

    def _make_samples(self, samples: SpeechSamples, step: int) -> None:
        began, name = time.perf_counter(), self.names[-1]
        with self._weights(name):
            scores = samples.make(step, name, self.metrics.trackers)
        self._record({"weights": name, **scores}, step, began, "speech")

    def _record(
        self, row: dict[str, Any], step: int, began: float, group: str = "validation"
    ) -> None:
        seconds = time.perf_counter() - began
        # A scorer may give a NaN, which JSON lacks and which would win every comparison.
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        row = {"step": step, "time": time.time(), "seconds": seconds, **known}
        self.rows.append(row)
        if self.run_folder.rank != 0:
            return
        self.run_folder.validation.append(row)
        if self.metrics.trackers is not None:
            scalars = {
                f"{group}{'_by_time' if '_at_' in name else ''}/{name}": value
                for name, value in row.items()
                if isinstance(value, float) and name != "time"
            }
            self.metrics.trackers.log(scalars, step)
        logger.info(sentence(row, "samples" if group == "speech" else group))


def sentence(row: dict[str, Any], kind: str) -> str:
    """A row of validation.jsonl in words; what was not measured is left out."""
    shown = [
        f"{words} {format(row[name], form)}"
        for name, (words, form, _) in FIGURES.items()
        if row.get(name) is not None
    ]
    about = f"with weights {row['weights']}; {row['seconds']:.1f} s"
    return f"{kind} at step {row['step']}: {', '.join(shown)} {about}"


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode and eager blocks: batches of validation have shapes of their own, and each compiled
    one would count against the limit of graphs."""
    training, attention = model.training, model.args.attention
    model.eval()
    model.args.attention = "sdpa"
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(training)
        model.args.attention = attention
        _forget_gathered(model)


def _forget_gathered(model: nn.Module) -> None:
    """Sharded weights have changed: the gathered copies that FSDP keeps after a forward pass are stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
