"""Trains and evaluates the in-fill model by the package's own commands.

    python -m benchmarks.quality.infill_run [--joined] train --job.config_file X.toml [--section.key value ...]
    python -m benchmarks.quality.infill_run evaluate RUN --test DATA/heldout --recognizer words:...

The trainer with its loader, optimizer, schedule, averages, validation and checkpoints, and the evaluation
with its lengths, codec, recognizer and figures are the package's. Model, objective and sampling are put in
the place of theirs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX

from benchmarks.quality.infill_model import InfillModel, characters
from benchmarks.quality.infill_task import (
    ReferenceTexts,
    Rows,
    dropped,
    fill_in,
    joined,
    masked_spans,
)
from titan_tts.speak import load_run, synthesizer
from torchtitan.models.dit_tts import train_spec, trainer
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.text.build_tokenizer import load_tokenizer
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder


class InfillPass(ForwardPass):
    """The forward pass with the in-fill objective.

    The held-out loss is that of the task in sampling: an utterance behind its reference, whose frames and
    text are given. So it has the conditions, times and noise that the package's has.

    Attributes:
        texts: those of the references.
    """

    texts: Callable[[], ReferenceTexts]

    def loss_sum(self, batch: dict[str, Any]) -> torch.Tensor:
        rows, spans = batch["rows"], batch["spans"]
        with torch.no_grad():
            place = batch["global_batch"], batch["row"]
            noisy = self.add_noise(rows.latents, *place, batch["global_batch_size"])
            keep_given, keep_text = dropped(self.config.data.seed, *place)
            given = torch.where(spans[..., None], 0.0, rows.latents) * keep_given[:, None, None]
        with self.amp:
            prediction = self.model(noisy.latents, noisy.t, rows.mask, given, rows.ids, keep_text)
        losses = self.loss_fn(prediction, noisy.target, spans)
        self.metrics.count_losses(noisy.t, losses.detach(), spans.sum(1))
        return losses.sum()

    def encode(self, batch: dict[str, Any]) -> Any:
        return self.texts().prompted(batch)

    def predict(
        self,
        batch: dict[str, Any],
        noisy: torch.Tensor,
        times: torch.Tensor,
        keep: Any = None,
        conditions: Any = None,
    ) -> torch.Tensor:
        latents, t, prompts = noisy, times, conditions
        rows = prompts.rows(latents, batch["frame_mask"])
        given = prompts.given(rows.mask.shape[1])
        # The reference's frames at time t, as in training, with noise that is always the same.
        generator = torch.Generator().manual_seed(self.config.validation.seed)
        noise = torch.randn(given.shape, generator=generator)
        before = torch.arange(rows.mask.shape[1]) < prompts.reference_frames[:, None]
        level = t[:, None, None]
        noisy = torch.where(before[..., None], (1 - level) * given + level * noise, rows.latents)
        with self.amp:
            output = self.model(noisy, t, rows.mask, given, rows.ids)
        return prompts.behind(output, latents.shape[1])


class InfillTrainer(trainer.DiTTTSTrainer):
    """The trainer with the in-fill objective."""

    joined = False

    def build_forward_pass(self, text_encoder: PretrainedTextEncoder | None) -> ForwardPass:
        forward_pass = super().build_forward_pass(text_encoder)
        assert isinstance(forward_pass, InfillPass)
        forward_pass.texts = self._texts
        return forward_pass

    def _texts(self) -> ReferenceTexts:
        """Built when first needed: by validation or by joined rows."""
        if "_reference_texts" not in vars(self):
            data = self.config.data
            heldout = open_training_data(replace(data, path=self.config.validation.path))
            tokenizer: Any = self.dataloader.tokenizer
            self._reference_texts = ReferenceTexts([self.dataloader.dataset, heldout], tokenizer)
        return self._reference_texts

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Any], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Adds the rows and their spans; `valid_frames` are those that the loss counts."""
        for batch, labels in super().batch_generator(data_iterable):
            frame_mask = labels != IGNORE_INDEX
            rows = (
                joined(batch, labels, self._texts())
                if self.joined
                else Rows(batch["latents"], frame_mask, characters(batch["text_ids"]))
            )
            place = self.config.data.seed, batch["global_batch"], batch["row"]
            spans = masked_spans(rows.mask.sum(1), rows.mask.shape[1], *place)
            batch = {**batch, "rows": rows, "spans": spans, "valid_frames": int(spans.sum())}
            yield batch, labels


def substitute(joined_rows: bool) -> None:
    """Puts the in-fill model into the package's trainer and loader of runs."""
    InfillTrainer.joined = joined_rows
    trainer.ForwardPass = InfillPass  # type: ignore[misc]
    trainer.DiTTTSTrainer = InfillTrainer  # type: ignore[misc]
    train_spec.DiTTTSModel = InfillModel  # type: ignore[assignment,misc]
    load_run.DiTTTSModel = InfillModel  # type: ignore[assignment,misc]


def substitute_sampler(run: str, test: str) -> None:
    """Puts in-filling in the place of the package's sampler, for the prompts of a prepared folder."""
    config = load_run_config(Path(run))
    prompts = open_training_data(replace(config.data, path=test))
    texts = ReferenceTexts([prompts], load_tokenizer(Path(run), config))

    def generate(model: Any, tokenizer: Any, objective: Any, requests: Any, *rest: Any) -> Any:
        _, seed, device, *_ = rest
        return fill_in(model, texts.requested(requests), requests, seed, device)

    synthesizer.generate_latents = generate  # type: ignore[assignment]


def main(args: list[str]) -> int:
    joined_rows = "--joined" in args
    args = [each for each in args if each != "--joined"]
    substitute(joined_rows)
    if args[0] == "train":
        from torchtitan.models.dit_tts.main import train

        return train(args[1:])
    from titan_tts.cli import main as cli

    substitute_sampler(args[1], args[args.index("--test") + 1])
    return cli(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
