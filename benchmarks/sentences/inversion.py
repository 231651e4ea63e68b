"""Speaker inversion: one reference is learned from minutes of a voice, and the network stays as it is.

python -m benchmarks.sentences.inversion outputs/sentences_base outputs/sentences_adapted/inversion-1-0/data

The loss is the base's. Learned are the latents of the reference or the outputs of the speaker encoder in their place, as
textual inversion learns a word's embedding (Gal et al. 2022, arXiv 2208.01618). `adapt` makes its rows with the recipes
of METHODS; the command prints the losses of others, by which these were chosen.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from benchmarks.sentences.referee import words
from titan_tts.evaluate.evaluate_command import read_tests
from titan_tts.evaluate.options import Options
from titan_tts.evaluate.prompts import encode_prompts
from titan_tts.evaluate.report import SYSTEM, Row, figures_of
from titan_tts.evaluate.systems import System
from titan_tts.speak.load_run import load_run
from titan_tts.speak.sampling_options import load_synthesizer
from titan_tts.speak.speaker_reference import reference_settings
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.flow.objective import squared_error_sums
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.speech.scoring.interface import SpeakerScorer
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, score
from torchtitan.models.dit_tts.validation.fixed_batches import FixedSet
from torchtitan.models.dit_tts.validation.heldout_loss import HeldoutLoss

BATCH = 16
MEASURES = 5
"""of the held-out loss in a training"""


@dataclass(frozen=True)
class Recipe:
    learned: str
    """latents of the reference, or outputs of the speaker encoder"""

    rate: float
    steps: int
    start: str = "recording"
    """a reference of the data, or noise of its length"""


METHODS = {
    "inversion": Recipe("latents", 0.01, 100),
    "inversion, outputs": Recipe("outputs", 0.3, 200),
}


class LearnedReference(nn.Module):
    """In place of a speaker encoder: the same conditions for every sample.

    Args:
        reference: (R, C) latents to start from.
    """

    def __init__(self, encoder: nn.Module, reference: torch.Tensor, learned: str):
        super().__init__()
        self.encoder = encoder if learned == "latents" else None
        start = reference[None]
        if self.encoder is None:
            start, _ = encoder(start, torch.ones_like(start[..., 0], dtype=torch.bool))
        self.values = nn.Parameter(start.detach().clone())

    def forward(
        self, latents: torch.Tensor, mask: torch.Tensor, packed: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.values
        valid = torch.ones_like(found[..., 0], dtype=torch.bool)
        if self.encoder is not None:
            found, valid = self.encoder(found, valid)
        return found.expand(len(latents), -1, -1), valid.expand(len(latents), -1)


def invert(
    base: Path, data: Path, recipe: Recipe, seed: int, heldout: Path | None = None
) -> tuple[LearnedReference, list[dict[str, Any]]]:
    """The learned reference with the lowest held-out loss, and the losses at step 0 and after each fifth of the steps.

    Args:
        data: folder of train/ and heldout/.
        seed: of the order, noise and times; numbers the recording that it starts from.
    """
    run = load_run(base)
    config, model = run.config, cast(Any, run.model.requires_grad_(False))
    config.data.seed = seed
    config.objective.speaker_dropout = 0.0  # a sample without the reference has no gradient
    metrics = cast(TTSMetricsProcessor, SimpleNamespace(count_losses=lambda *of_step: None))
    forward = ForwardPass(
        *(config, model, run.text_encoder, model.args.first_condition_id, squared_error_sums),
        *(metrics, run.device, nullcontext()),
    )

    def samples(path: Path, count: int = 10**6) -> FixedSet:
        dataset = open_training_data(replace(config.data, path=str(path)))
        return FixedSet(dataset, config.data, run.tokenizer, count, BATCH)

    train = samples(data / "train")
    sets = samples(heldout or data / "heldout"), samples(data / "train", BATCH)
    loss = HeldoutLoss(*sets, config.validation, run.objective, forward)
    torch.manual_seed(seed)
    reference = torch.from_numpy(train.dataset.load(seed % len(train)).reference)
    reference = reference[: config.data.max_speaker_frames].float()
    rows: list[dict[str, Any]] = [{"step": "none", **_losses(loss)}]  # each with its own reference
    if recipe.start == "noise":
        reference = torch.randn_like(reference)
    learned = LearnedReference(model.speaker_encoder, reference, recipe.learned)
    model.speaker_encoder = learned
    optimizer = torch.optim.Adam([learned.values], recipe.rate)
    batches = _endless(train)
    best, kept = float("inf"), learned.values.detach().clone()
    for step in range(recipe.steps + 1):
        if step % (recipe.steps // MEASURES) == 0:
            rows.append({"step": step, **_losses(loss)})
            if step and rows[-1]["heldout_loss"] < best:
                best, kept = rows[-1]["heldout_loss"], learned.values.detach().clone()
        optimizer.param_groups[0]["lr"] = recipe.rate * (1 - step / recipe.steps)
        batch = forward.to_device(next(batches))
        batch["global_batch"] = torch.tensor(step)
        total = forward.loss_sum(batch)
        optimizer.zero_grad()
        (total / batch["frame_mask"].sum()).backward()
        optimizer.step()
    with torch.no_grad():
        learned.values.copy_(kept)
    return learned, rows


def _losses(loss: HeldoutLoss) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in loss.measure(gains=False).items()}


def _endless(samples: FixedSet) -> Iterator[dict[str, Any]]:
    batches = [samples.load(number).inputs for number in range(len(samples.batches))]
    while True:
        for number in torch.randperm(len(batches)).tolist():
            yield dict(batches[number])


def judge(
    base: Path, learned: LearnedReference, test: Path, utterances: int, voices: SpeakerScorer
) -> dict[str, Any]:
    """Figures of a set's texts in the learned voice, as `titan-tts evaluate` measures them of a run."""
    options = Options(run=str(base), test=str(test), max_utterances=utterances)
    synthesizer = load_synthesizer(options)
    cast(Any, synthesizer.run.model).speaker_encoder = learned
    _, tests = read_tests(options, synthesizer.run.config)
    encode_prompts(tests, synthesizer.codec, reference_settings(synthesizer.data_path))
    scorers, scores = Scorers(words("cpu"), voices), {}
    for index, sound in System("inversion", synthesizer).speak(tests.prompts, 0):
        prompt = tests.prompts[index]
        assert prompt.load_reference is not None
        reference = replace(prompt.load_reference(), latents=prompt.reference)
        scores[index] = score(sound, prompt.text, scorers, reference, prompt.language)
    row = Row("inversion", SYSTEM, [0], [[scores[index] for index in range(len(scores))]])
    return figures_of(row, tests.prompts, synthesizer.codec.frames_per_second)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("data", type=Path, help="as of `titan-tts prepare`")
    parser.add_argument("--heldout", type=Path, help="other held-out shards than the data's")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.1, 0.3])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(args)
    tried = itertools.product(("latents", "outputs"), options.rates, ("recording", "noise"))
    for learned, rate, start in tried:
        recipe = Recipe(learned, rate, options.steps, start)
        _, losses = invert(options.base, options.data, recipe, 0, options.heldout)
        print(json.dumps({**asdict(recipe), "losses": losses}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
