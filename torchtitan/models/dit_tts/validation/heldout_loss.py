"""The loss of held-out and of training samples at fixed times and with fixed noise.

Between two validations only the weights differ, so the figures fall smoothly and compare between runs. A
gain is what a condition is worth: the loss with another sample's text (another speaker's reference, another caption)
minus the loss with the right one, at the same time and noise. It is 0 where the model does not use it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.config.job_config import Validation
from torchtitan.models.dit_tts.flow.counter_rng import stream_keys
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sums
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.infra.collectives import share_of
from torchtitan.models.dit_tts.model.conditions import Conditions
from torchtitan.models.dit_tts.validation.fixed_batches import GAINS, FixedBatch, FixedSet

# Apart from training's streams, the sampler's and the conditions'.
_STREAM = 300

Losses = dict[str, torch.Tensor]
"""(times,) float64 on the CPU by figure; nan where nothing was measured"""


class HeldoutLoss:
    """Measures a held-out set and a training set.

    Args:
        forward_pass: of the network; every rank calls it at once.
        rank, ranks, group: of the data-parallel ranks; no group for one.
        error_sums: the loss function.
        row_figures: further figures of the held-out set, means over its samples, by name: of each a
            function of the network's output and frame_mask to (B,).
        until_stopped: yields the batches, and raises once the run is to end.
    """

    def __init__(
        self,
        heldout: FixedSet,
        training: FixedSet,
        validation: Validation,
        objective: FlowMatching,
        forward_pass: ForwardPass,
        rank: int = 0,
        ranks: int = 1,
        group: dist.ProcessGroup | None = None,
        error_sums: Callable[..., torch.Tensor] = squared_error_sums,
        row_figures: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType({}),
        until_stopped: Callable[[Any], Iterable[Any]] = iter,
    ):
        self.sets = {"heldout_loss": heldout, "training_loss": training}
        self._batches = {
            name: [(each.load(n), counts) for n, counts in share_of(len(each.batches), rank, ranks)]
            for name, each in self.sets.items()
        }
        self.times, self.seed, self.objective = validation.times, validation.seed, objective
        self.forward_pass, self.device, self.group = forward_pass, forward_pass.device, group
        self.error_sums, self.row_figures = error_sums, row_figures
        self.until_stopped = until_stopped
        self._targets: dict[tuple[int, int], torch.Tensor] = {}  # of a student, which stay the same

    @torch.no_grad()
    def measure(self, gains: bool) -> Losses:
        """The losses of the network's present weights, on every rank. A collective. `gains`: also
        the gains of text, speaker and caption on the held-out set.
        """
        found: Losses = {}
        for number, (name, each) in enumerate(self.sets.items()):
            kinds = ["", *each.gains] if gains and name == "heldout_loss" else [""]
            sums = self._sums(self._batches[name], len(each), kinds, number)
            loss, frames = sums[0, :, 0], sums[0, :, 1]
            found[name] = loss / frames
            if name == "heldout_loss":
                means = sums[0, :, 3:].T / len(each)
                found |= dict(zip(self.row_figures, means, strict=True))
            for kind, of_kind in zip(kinds[1:], sums[1:], strict=True):
                wrong, valid, right, *_ = of_kind.unbind(-1)  # of rows with another text or speaker
                found[kind] = (wrong - right) / valid
        return found

    def _sums(
        self,
        batches: list[tuple[FixedBatch, bool]],
        samples: int,
        kinds: list[str],
        set_number: int,
    ) -> torch.Tensor:
        """(kinds, times, 3 + row figures) sums over the samples of a set: the loss, the frames, the loss with
        the right condition of the same samples, and the row figures."""
        shape = len(kinds), len(self.times), samples, 3 + len(self.row_figures)
        values = torch.zeros(shape, dtype=torch.float64, device=self.device)
        teacher = self.forward_pass.teacher
        for fixed, counts in self.until_stopped(batches):
            inputs = self.forward_pass.to_device(fixed.inputs)
            mask = inputs["frame_mask"]
            frames = mask.sum(1).double()
            rows = fixed.rows.to(self.device)
            variants = self._variants(fixed, inputs, kinds)
            for position, t in enumerate(self.times):
                place = torch.tensor(position, device=self.device)
                keys = stream_keys(self.seed, place, rows, _STREAM + set_number)
                times = torch.full((len(rows),), t, device=self.device)
                noisy, target = self.objective.add_noise_at(inputs["latents"], times, keys)
                if teacher is not None:
                    if (key := (id(fixed), position)) not in self._targets:
                        keep = torch.ones_like(times, dtype=torch.bool)
                        self._targets[key] = teacher.target(inputs, noisy, times, (keep,) * 3)
                    target = self._targets[key]
                right = None
                for kind, (batch, conditions, measured) in enumerate(variants):
                    given = batch, noisy, times
                    output = self.forward_pass.predict(*given, conditions=conditions)
                    loss = self.error_sums(output, target, mask).double()
                    right = loss if right is None else right
                    if counts:
                        more = [each(output, mask).double() for each in self.row_figures.values()]
                        row = torch.stack([loss, frames, right, *more], -1) * measured[:, None]
                        values[kind, position, rows] = row
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        # Summed here, in one order for any number of ranks.
        return values.cpu().sum(2)

    def _variants(
        self, fixed: FixedBatch, inputs: dict[str, Any], kinds: list[str]
    ) -> list[tuple[dict[str, Any], Conditions, torch.Tensor]]:
        """The batch of each kind, its conditions, and the rows that count for it."""
        everything = torch.ones(len(fixed.rows), dtype=torch.bool)
        found = []
        for kind in kinds:
            entries, measured = fixed.others[kind] if kind else ({}, everything)
            given = self.forward_pass.to_device({**fixed.inputs, **entries}) if kind else inputs
            found.append((given, self.forward_pass.encode(given), measured.to(self.device)))
        return found


def figures(by_weights: dict[str, Losses], times: Sequence[float], plain: str) -> dict[str, Any]:
    """The figures of a row of validation.jsonl; see `history`.

    Args:
        by_weights: losses of the trained weights and of each average.
        plain: the weights whose figures have the plain names.
    """
    row: dict[str, Any] = {"weights": plain}
    for name, losses in by_weights.items():
        losses = {**losses, "gap": losses["heldout_loss"] - losses["training_loss"]}
        for figure, values in losses.items():
            mean = _number(values.mean())
            if name == plain:
                row[figure] = mean
                row |= {
                    f"{figure}_at_{t:g}": _number(v) for t, v in zip(times, values, strict=True)
                }
            if figure not in GAINS:
                row[f"{figure}_{name}"] = mean
    heldout = {name: row[f"heldout_loss_{name}"] for name in by_weights}
    best = min(heldout, key=lambda name: (heldout[name] is None, heldout[name] or 0.0))
    return {**row, "best_heldout_loss": heldout[best], "best_weights": best}


def _number(value: torch.Tensor) -> float | None:
    return float(value) if torch.isfinite(value) else None
