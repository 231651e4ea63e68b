"""A dataset without files: random latents, references, token ids and text features of chosen lengths.

The real loader reads it, so batches have the real keys, shapes, masks and order. Values are drawn once
into a pool; each sample is a slice of it that is copied into the batch as a stored one would be. No
value is zero: zeros need less power, and a GPU then runs faster than in training.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.job_config import Benchmark, Data, JobConfig, is_pretrained
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.dataset import Dataset, Fetched, LoadedSample
from torchtitan.models.dit_tts.data.packed_rows import batch_policy
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

UTTERANCES = 20_000
"""Samples of the synthetic dataset"""

LATENT_STD = 0.8
"""Standard deviation of the latents, about as DAC-VAE's"""

BYTES_PER_SECOND = 14.0
SUBWORDS_PER_SECOND = 3.3
"""Text tokens per second of speech of a learned and of a pretrained encoder"""

_BEGIN_AND_END = 2
_RATE_SPREAD = 0.15
_SHORTEST_SECONDS = 1.0
# With a smaller fraction of the distribution within the limits, a bucket would have hardly any sample.
_MIN_FRACTION = 1e-4


def utterance_frames(
    benchmark: Benchmark, data: Data, generator: np.random.Generator
) -> np.ndarray:
    """(n,) int64 latent frames: [data] max_frames for all, or log-normal between 1 s and max_frames."""
    if benchmark.lengths == "longest":
        return np.full(UTTERANCES, data.max_frames, np.int64)
    longest = data.max_frames / data.frames_per_second
    shortest = min(_SHORTEST_SECONDS, longest / 2)
    normal = torch.distributions.Normal(
        math.log(benchmark.mean_seconds) - benchmark.sigma**2 / 2, benchmark.sigma
    )
    low, high = (
        float(normal.cdf(torch.tensor(x, dtype=torch.float64).log())) for x in (shortest, longest)
    )
    if high - low < _MIN_FRACTION:
        raise InputError(
            f"[benchmark] mean_seconds = {benchmark.mean_seconds}, but with sigma = {benchmark.sigma} "
            f"only {high - low:.1e} of the utterances are between {shortest:g} s and [data] max_frames "
            f"= {data.max_frames} ({longest:g} s); choose a mean within these"
        )
    # Inverse transform sampling: no draw lies outside the limits.
    quantiles = torch.from_numpy(generator.uniform(low, high, UTTERANCES))
    seconds = normal.icdf(quantiles).exp().numpy()
    frames = np.ceil(seconds * data.frames_per_second).astype(np.int64)
    return frames.clip(1, data.max_frames)


class SyntheticDataset(Dataset):
    """The part of a `Dataset` that the loader uses, without files.

    Args:
        tokens_per_second: of text, without conditioning tokens, begin and end.
        extra_tokens: conditioning tokens, begin and end of each row.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        data: Data,
        seed: int,
        tokens_per_second: float,
        extra_tokens: int,
    ):
        # Dataset's own __init__ reads indexes, of which there are none.
        generator = np.random.default_rng(seed)
        self.tar_paths = []
        self.problems = []
        self.latent_channels = data.latent_channels
        self.frames = utterance_frames(benchmark, data, generator)
        n = len(self.frames)
        if benchmark.lengths == "longest":
            self.reference_frames = np.full(n, data.max_speaker_frames, np.int64)
            self.tokens = np.full(n, data.max_text_tokens, np.int32)
        else:
            # As `prepare` makes them: another utterance, cropped.
            others = generator.permutation(self.frames)
            self.reference_frames = np.minimum(others, data.max_speaker_frames)
            rate = tokens_per_second * generator.lognormal(0.0, _RATE_SPREAD, n)
            tokens = extra_tokens + np.ceil(self.frames / data.frames_per_second * rate)
            self.tokens = tokens.clip(extra_tokens + 1, data.max_text_tokens).astype(np.int32)
        # Twice the longest slice: samples begin at different places.
        longest = max(data.max_frames, data.max_speaker_frames)
        self._pool = LATENT_STD * generator.standard_normal(
            (2 * longest, self.latent_channels), np.float32
        )
        self._caption = "x" * data.max_caption_tokens
        self._starts = generator.integers(0, longest, (n, 2))
        self.fingerprint = f"synthetic {benchmark.lengths} {n} {seed}"

    def __len__(self) -> int:
        return len(self.frames)

    def sample_id(self, sample: int) -> str:
        return f"synthetic:{sample:07d}"

    def fetch(self, samples: Sequence[int] | np.ndarray, latents_of: Sequence[int] = ()) -> Fetched:
        """There is nothing to download."""
        return Fetched({}, {})

    def load(
        self,
        sample: int,
        out: Sequence[np.ndarray] | None = None,
        fetched: bytearray | None = None,
        crop: int = 0,
    ) -> LoadedSample:
        """Copies a sample into the first rows (rows, C) of the buffers; see `Dataset.load`. All parts of
        a reference are alike random, so `crop` chooses none."""
        assert out is not None
        arrays = []
        streams = {"frames": (self.frames, 0), "reference_frames": (self.reference_frames, 1)}
        for member, target in zip(members.ARRAYS, out, strict=True):
            lengths, stream = streams[member.length]
            length, start = min(int(lengths[sample]), len(target)), self._starts[sample, stream]
            arrays.append(target[:length])
            arrays[-1][:] = self._pool[start : start + length, : target.shape[1]]
        metadata = {"text": "", "tokens": int(self.tokens[sample]), "sample": sample}
        metadata[members.CAPTION] = self._caption
        return LoadedSample(arrays, metadata)


def synthetic_data(config: JobConfig, ranks: int) -> tuple[SyntheticDataset, BatchPolicy]:
    """The samples of [benchmark], and the buckets or rows that real data of these lengths would have."""
    data = config.data
    rate = SUBWORDS_PER_SECOND if is_pretrained(config.encoder.model) else BYTES_PER_SECOND
    extra_tokens = _BEGIN_AND_END + len(data.conditioning)
    dataset = SyntheticDataset(config.benchmark, data, data.seed, rate, extra_tokens)
    global_batch_size, _ = batch_split(config.training, ranks)
    lengths = dataset.frames, dataset.reference_frames, dataset.tokens
    return dataset, batch_policy(data, global_batch_size, *lengths)


class RandomTokens(ConditionedTokenizer):
    """Token ids drawn uniformly from the text's ids. `text_ids`: number of text ids, which come
    before the conditioning tokens' ids.
    """

    def __init__(self, text_ids: int, fields: Sequence[str], longest: int, seed: int):
        super().__init__(Vocabulary())
        self.fields = tuple(fields)
        self.n_conditions = len(self.fields)
        self.vocab_size = text_ids + self.n_conditions
        generator = np.random.default_rng(seed)
        self._pool = generator.integers(self.pad_id + 1, text_ids, 2 * longest)
        self._conditions_ids = np.arange(text_ids, self.vocab_size)
        self._longest = longest

    def max_tokens(self, dataset: Dataset, part: tuple[int, int] = (0, 1)) -> np.ndarray:
        assert isinstance(dataset, SyntheticDataset)
        return dataset.tokens

    def encode_into(
        self,
        row: np.ndarray,
        text: str,
        metadata: Mapping[str, Any] = {},
        drop: Sequence[bool] = (),
    ) -> int:
        """Writes random ids to the start of row (L,); `text` decides nothing."""
        tokens, conditions = metadata["tokens"], self.n_conditions
        start = metadata["sample"] % self._longest
        row[:tokens] = self._pool[start : start + tokens]
        row[:conditions] = self._conditions_ids
        return tokens

    def _no_text(self, *given: Any) -> Any:
        raise NotImplementedError("random ids have no text")

    encode = spans = text_ids = text_spans = _no_text  # type: ignore[assignment]

    def unknown_characters(self, text: str) -> list[str]:
        return []
