"""The samples of every validation: chosen once, in batches that do not depend on the number of ranks."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatch
from torchtitan.models.dit_tts.data.buckets import batch_shape, choose_edges, select_samples
from torchtitan.models.dit_tts.data.collate import Collator, trim_captions
from torchtitan.models.dit_tts.data.corrupt_samples import CorruptSampleCounter
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.data.members import caption_of
from torchtitan.models.dit_tts.data.references import FixedReferences
from torchtitan.models.dit_tts.data.row_loader import RowLoader
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, with_duration
from torchtitan.tools.logging import logger

GAINS = TEXT, SPEAKER, CAPTION = "text_gain", "speaker_gain", "caption_gain"


@dataclass(frozen=True)
class FixedBatch:
    """A batch of B samples, padded to its longest.

    Attributes:
        rows: (B,) int64, the samples' positions in the set.
        inputs: as the data loader's.
        others: TEXT -> entries of `inputs` with the text of another row, under the row's own conditions and as well aligned
            to its latents as its own text is, and (B,) bool, the rows that have a second text; SPEAKER -> likewise with the reference of another speaker; CAPTION ->
            likewise with another caption, for a model that takes captions.
    """

    rows: torch.Tensor
    inputs: dict[str, Any]
    others: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]


class FixedSet:
    """An even selection of a dataset's samples, in batches of similar lengths.

    Args:
        data: its limits hold.
        count: maximum number of samples.
        batch_size: samples per batch.
        whole_rows: rows are as long as those of generation, for a run whose loss is on padding, too.
    """

    def __init__(
        self,
        dataset: Dataset,
        data: Data,
        tokenizer: ConditionedTokenizer,
        count: int,
        batch_size: int,
        whole_rows: bool = False,
    ):
        self.dataset, self.data, self._whole_rows = dataset, data, whole_rows
        self._references = FixedReferences(dataset) if data.references == "drawn" else None
        self.gains = GAINS if data.max_caption_tokens else GAINS[:2]
        """what is measured"""
        tokens = tokenizer.max_tokens(dataset)
        selection = select_samples(dataset.frames, tokens, data)
        self.fitting = selection.samples
        """(n,) samples of the dataset that are within all limits"""
        number = len(selection.samples)
        chosen = np.unique(np.linspace(0, number - 1, min(number, count)).round().astype(np.int64))
        if data.on_error == "skip":
            chosen = chosen[[self._is_valid(sample) for sample in selection.samples[chosen]]]
        if not len(chosen):
            raise InputError(
                f"all {min(number, count)} samples chosen for validation are corrupt; restore their files, or "
                "give other held-out data"
            )
        # Similar lengths share a batch; the sort is stable, so equal ones keep their order.
        chosen = chosen[np.argsort(selection.frames[chosen], kind="stable")]
        self.samples = selection.samples[chosen]
        # Of about one size: partners are from the same batch, and one of one row would have none.
        count = -(-len(chosen) // batch_size)
        self.batches = np.array_split(self.samples, count)
        self._first = np.cumsum([0, *map(len, self.batches)])
        # Dropout of conditioning tokens is training's.
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.conditioning_dropout = 0.0
        self._collator = Collator(
            RowLoader(
                dataset, self.tokenizer, CorruptSampleCounter("raise"), data.frames_per_second
            ),
            [self._shape(samples, tokens) for samples in self.batches],
            references=self._references,
            caption_tokens=data.max_caption_tokens,
        )

    def _shape(self, samples: np.ndarray, tokens: np.ndarray) -> tuple[int, int, int]:
        """Return the shape of a batch that is as long as its longest sample, or of whole rows."""
        edge = self.data.max_frames
        if not self._whole_rows:
            (edge,) = choose_edges(self.dataset.frames[samples], 1, edge)
        longest_reference = int(self.dataset.reference_frames[samples].max(initial=1))
        if self._references is not None:
            for sample in samples.tolist():
                pieces = self._references.pieces(sample, self.data.max_speaker_frames)
                longest_reference = max(longest_reference, sum(piece.frames for piece in pieces))
        return batch_shape(self.data, edge, int(tokens[samples].max(initial=1)), longest_reference)

    def __len__(self) -> int:
        return len(self.samples)

    def _is_valid(self, sample: int) -> bool:
        try:
            self.dataset.load(sample)
        except CorruptSampleError as error:
            logger.warning(f"{error}; validation skips it")
            return False
        return True

    def load(self, number: int) -> FixedBatch:
        """A batch, read from the shards."""
        samples = self.batches[number]
        batch = GlobalBatch(number, 0, number, samples)
        inputs, _ = self._collator.collate(batch, 0, len(samples))
        trim_captions(inputs)
        metadata = [
            with_duration(each, frames, self.data.frames_per_second)
            for each, frames in zip(
                self.dataset.metadata_of(samples.tolist()), inputs["frames"].tolist(), strict=True
            )
        ]
        count, words = len(samples), [row["text"].split() for row in metadata]
        text = _partners(count, lambda a, b: words[a] != words[b])
        has_reference = inputs["speaker_frames"].bool().tolist()
        speakers = [row.get("speaker") for row in metadata]
        speaker = _partners(
            count,
            lambda a, b: (
                has_reference[a]
                and has_reference[b]
                and None not in (speakers[a], speakers[b])
                and speakers[a] != speakers[b]
            ),
        )
        ids = torch.full_like(inputs["text_ids"], self.tokenizer.pad_id)
        texts = [metadata[row]["text"] for row in _filled(text)]
        lengths = [
            self.tokenizer.encode_into(*each)
            for each in zip(ids.numpy(), texts, metadata, strict=True)
        ]
        positions = torch.full(ids.shape, -1.0)
        if self.tokenizer.aligner is not None:
            # The right text has its recording's own timing, by which alone speech is easier to tell.
            for row, each, latents, frames in zip(
                positions.numpy(), texts, inputs["latents"].numpy(), inputs["frames"].tolist()
            ):
                aligned = self.tokenizer.aligned_frames(each, latents[:frames])
                placed = self.tokenizer.text_positions(each, aligned)
                row[: len(placed)] = placed
        other_text = {
            "text_ids": ids,
            "text_tokens": torch.tensor(lengths),
            "text_positions": positions,
        }
        other_speaker = {n: inputs[n][_filled(speaker)] for n in ("speaker", "speaker_frames")}
        others = {
            TEXT: (other_text, torch.tensor([partner is not None for partner in text])),
            SPEAKER: (other_speaker, torch.tensor([partner is not None for partner in speaker])),
        }
        if "caption_ids" in inputs:
            captions = list(map(caption_of, metadata))
            caption = _partners(count, lambda a, b: captions[a] != captions[b] != "" != captions[a])
            other = {n: inputs[n][_filled(caption)] for n in ("caption_ids", "caption_tokens")}
            others[CAPTION] = other, torch.tensor([partner is not None for partner in caption])
        first = int(self._first[number])
        return FixedBatch(torch.arange(first, first + count), inputs, others)


def _partners(count: int, differs: Callable[[int, int], bool]) -> list[int | None]:
    """Return the partner of each row: the next row, in a circle, that differs from it; None without one."""
    return [
        next((b for b in ((a + n) % count for n in range(1, count)) if differs(a, b)), None)
        for a in range(count)
    ]


def _filled(partners: list[int | None]) -> list[int]:
    """Rows without a partner keep their own entries."""
    return [row if partner is None else partner for row, partner in enumerate(partners)]
