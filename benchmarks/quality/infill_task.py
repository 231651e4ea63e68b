"""What the in-fill model is trained on and asked for: spans of frames to fill in, prompts, guidance.

After arXiv 2410.06885: of every row a random contiguous 70 to 100 % of the frames is masked, the others are
given clean, and the loss counts the masked frames alone; times are uniform. The given frames are dropped in
30 % of the rows, and in 20 % of all rows text and given frames both. To say a text in a voice, a reference
with its own text stands before it as the frames that are given.

A row is an utterance alone, or, "joined", the reference of the sample and then the utterance, each with its
text: then training has rows as sampling has them. The texts of references come from `reference_key` in the
JSON of `titan-tts prepare`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torchtitan.components.loss import IGNORE_INDEX

from benchmarks.quality.infill_model import InfillModel, characters
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys, uniform
from torchtitan.models.dit_tts.speech.sampling.sampler import SAMPLING_STREAM, SpeechRequest
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer

MIN_MASKED = 0.7
DROP_GIVEN, DROP_BOTH = 0.3, 0.2
GUIDANCE, STEPS, SWAY = 2.0, 32, -1.0
"""of sampling, as in the paper"""

_SPAN, _START, _GIVEN, _BOTH = range(400, 404)
"""streams of random numbers, apart from those of the package"""


def masked_spans(
    frames: torch.Tensor, length: int, seed: int, global_batch: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """(B, length) bool, true at the frames to fill in of rows with `frames` (B,) frames: one contiguous
    span of 70 to 100 % of them, at least one frame, by (seed, global batch, row)."""
    span = uniform(stream_keys(seed, global_batch, row, _SPAN))
    start = uniform(stream_keys(seed, global_batch, row, _START))
    masked = ((MIN_MASKED + (1 - MIN_MASKED) * span) * frames).round().clamp_min(1).long()
    first = (start * (frames - masked + 1)).long()[:, None]
    places = torch.arange(length, device=frames.device)[None]
    return (places >= first) & (places < first + masked[:, None])


def dropped(
    seed: int, global_batch: torch.Tensor, row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) bool each: rows that keep the given frames, and rows that keep the text."""
    given = uniform(stream_keys(seed, global_batch, row, _GIVEN)) >= DROP_GIVEN
    both = uniform(stream_keys(seed, global_batch, row, _BOTH)) >= DROP_BOTH
    return given & both, both


class Rows(NamedTuple):
    """Frames (B, T, C) with their mask (B, T), and the characters (B, L) of all of a row."""

    latents: torch.Tensor
    mask: torch.Tensor
    ids: torch.Tensor


def _one_behind_the_other(
    first: torch.Tensor, lengths: torch.Tensor, second: torch.Tensor, second_lengths: torch.Tensor
) -> torch.Tensor:
    """Rows (B, R, ...) and (B, T, ...) of the lengths (B,), without what is between them; 0 behind."""
    pairs = zip(first, lengths.tolist(), second, second_lengths.tolist(), strict=True)
    return pad_sequence([torch.cat([a[:n], b[:m]]) for a, n, b, m in pairs], batch_first=True)


@dataclass(frozen=True)
class Prompted:
    """Utterances behind their references, as the model is asked for them. B rows."""

    reference: torch.Tensor
    """(B, R, C)"""

    reference_frames: torch.Tensor
    """(B,); 0 where there is none"""

    ids: torch.Tensor
    """(B, L), characters of the reference's text and of the utterance's"""

    def rows(self, latents: torch.Tensor, frame_mask: torch.Tensor) -> Rows:
        """Rows of references and then `latents` (B, T, C), of which frame_mask (B, T) is valid."""
        lengths = frame_mask.sum(1)
        joined = _one_behind_the_other(self.reference, self.reference_frames, latents, lengths)
        places = torch.arange(joined.shape[1], device=joined.device)
        return Rows(joined, places < (self.reference_frames + lengths)[:, None], self.ids)

    def given(self, length: int) -> torch.Tensor:
        """(B, length, C): the reference, and zero at what is asked for."""
        shape = (len(self.ids), length, self.reference.shape[-1])
        given = self.reference.new_zeros(shape)
        keep = min(length, self.reference.shape[1])
        places = torch.arange(keep, device=given.device)
        inside = (places < self.reference_frames[:, None])[..., None]
        given[:, :keep] = torch.where(inside, self.reference[:, :keep], 0.0)
        return given

    def behind(self, output: torch.Tensor, length: int) -> torch.Tensor:
        """Of the model's output for the rows (B, R + T, C) the part of the utterances, (B, length, C)."""
        places = self.reference_frames[:, None] + torch.arange(length, device=output.device)
        places = places.clamp_max(output.shape[1] - 1)
        return output.gather(1, places[..., None].expand(-1, -1, output.shape[-1]))


class ReferenceTexts:
    """Which text each sample's reference has."""

    def __init__(self, datasets: Sequence[Dataset], tokenizer: ConditionedTokenizer):
        self.tokenizer = tokenizer
        self.text_of_key: dict[str, str] = {}
        self.key_of_sample: dict[str, str] = {}
        for dataset in datasets:
            for index, metadata in enumerate(dataset.metadata_of(list(range(len(dataset))))):
                self.text_of_key[dataset.key(index)] = metadata["text"]
                self.key_of_sample[dataset.sample_id(index)] = metadata["reference_key"]

    def of_sample(self, sample_id: str) -> str:
        return self.text_of_key[self.key_of_sample[sample_id]]

    def before(self, text: str) -> torch.Tensor:
        """(L,) ids of a reference's text and the blank behind it, without begin and end."""
        return torch.tensor(self.tokenizer.encode(f"{text} "))[1:-1]

    def prompted(self, batch: dict[str, Any]) -> Prompted:
        """A batch of the data loader as it would be asked for."""
        own = characters(batch["text_ids"])
        before = [self.before(self.of_sample(each)) for each in batch["sample_id"]]
        lengths = torch.tensor([len(each) for each in before])
        ids = _one_behind_the_other(
            pad_sequence(before, batch_first=True).to(own.device), lengths, own, (own > 0).sum(1)
        )
        return Prompted(batch["speaker"], batch["speaker_frames"], ids)

    def requested(self, requests: Sequence[SpeechRequest]) -> Prompted:
        """Requests whose metadata has the `reference_key` of their reference."""
        both = []
        for request in requests:
            before = self.before(self.text_of_key[request.metadata["reference_key"]])
            own = torch.tensor(self.tokenizer.encode(request.text))[1:-1]
            both.append(torch.cat([before, own]))
        references = [request.reference.float() for request in requests]
        lengths = torch.tensor([len(each) for each in references])
        return Prompted(
            pad_sequence(references, batch_first=True),
            lengths,
            pad_sequence(both, batch_first=True),
        )


def joined(batch: dict[str, Any], labels: torch.Tensor, texts: ReferenceTexts) -> Rows:
    """A batch's rows, each behind its reference."""
    return texts.prompted(batch).rows(batch["latents"], labels != IGNORE_INDEX)


def sway_times(steps: int, coefficient: float = SWAY) -> list[float]:
    """steps + 1 times from 1 (noise) to 0 by sway sampling: with s < 0 more of them near the noise.

    The paper's u + s·(cos(πu/2) - 1 + u) for u from 0 to 1 is the fraction of the way to the data.
    """
    even = [step / steps for step in range(steps + 1)]
    return [1 - (u + coefficient * (math.cos(math.pi / 2 * u) - 1 + u)) for u in even]


@torch.no_grad()
def fill_in(
    model: InfillModel,
    prompts: Prompted,
    requests: Sequence[SpeechRequest],
    seed: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """Latents (frames, C) float32 of each request: v + 2·(v - v without text and reference), 32 Euler
    steps by sway sampling. The noise of a row is keyed by seed and request as in the package's sampler."""
    prompts = Prompted(*(each.to(device) for each in vars(prompts).values()))
    lengths = torch.tensor([request.frames for request in requests], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    empty = torch.zeros(*mask.shape, model.args.latent_channels, device=device)
    _, row_mask, ids = prompts.rows(empty, mask)
    total = row_mask.shape[1]
    given = prompts.given(total)
    keys = torch.tensor([request.noise_row() for request in requests], device=device)
    keys = stream_keys(seed, torch.tensor(0, device=device), keys, SAMPLING_STREAM)
    x = normal(keys, (total, model.args.latent_channels))
    both = (row_mask.repeat(2, 1), torch.cat([given, torch.zeros_like(given)]), ids.repeat(2, 1))
    keep_text = torch.arange(2 * len(requests), device=device) < len(requests)
    times = sway_times(STEPS)
    for t, t_next in zip(times, times[1:], strict=False):
        now = torch.full((2 * len(requests),), t, device=device)
        with_prompt, without = model(x.repeat(2, 1, 1), now, *both, keep_text).chunk(2)
        x = x + (t_next - t) * (with_prompt + GUIDANCE * (with_prompt - without))
    found = prompts.behind(x, mask.shape[1])
    return [row[: request.frames].cpu() for row, request in zip(found, requests, strict=True)]
