"""The time that a text takes to say: a least-squares fit of frames on the bytes of the text.

Over the training shards, frames are fitted as a weighted sum of the byte counts of the text (or its phones) and of its
added tokens (a laugh takes time, its letters do not) plus a constant, with ridge regularisation; each speaker's rate is
the ratio of real to fitted frames. A run's folder keeps it, so that no training data are needed to speak.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.corrupt_samples import read_metadata
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError, reading
from torchtitan.models.dit_tts.text.normalize import Normalizer
from torchtitan.models.dit_tts.text.phones import Phonemizer
from torchtitan.models.dit_tts.text.vocabulary import language_of

DURATIONS_FILE = "durations.json"

_RIDGE = 1.0
_MAX_SAMPLES = 20_000
_OUTLIER = 6.0  # robust standard deviations (1.4826 times the median distance) from the fit
_MAX_LENGTH = 4.0  # of a text in the fit, in median lengths
# For so many texts the fit of a base stands where a run starts from it: a minute of a new voice has a dozen.
_BASE_TEXTS = 100.0


class Counter:
    """Features of a text as words: counts of each byte of its letters or phones, a one, counts of each added token."""

    def __init__(self, language: str, added: Sequence[str], normalize: str = ""):
        self._tokens = AddedTokens(added)
        self._words = Normalizer(normalize, self._tokens)
        self._spell = Phonemizer(language) if language else str

    def spoken(self, text: str) -> str:
        return self._spell(self._tokens.without(self._words(text)))

    def __call__(self, text: str) -> np.ndarray:
        """(257 + tokens,)"""
        spoken = np.frombuffer(self.spoken(text).encode("utf-8", "replace"), np.uint8)
        found = [token for _, token in self._tokens.pieces(text)]
        tokens = [found.count(each) for each in self._tokens.tokens]
        return np.array([*np.bincount(spoken, minlength=256), 1.0, *tokens])


@dataclass(frozen=True)
class LinearDurationModel:
    """Fitted weights (257 + added tokens,) and the speaking rate of each speaker, 1 for an unknown one.

    Attributes:
        language: of the phones whose bytes count; empty: those of the text count.
        added, normalize: [encoder] added_tokens and normalize.
    """

    weights: np.ndarray
    speaker_scale: dict[str, float]
    language: str = ""
    added: tuple[str, ...] = ()
    normalize: str = ""

    @cached_property
    def _count(self) -> Counter:
        return Counter(self.language, self.added, self.normalize)

    def frames(self, text: str, speaker: str | None) -> int:
        """Latent frames for the text, at least 1."""
        return max(1, round(self.estimate(text, speaker)))

    def estimate(self, text: str, speaker: str | None) -> float:
        """`frames` before rounding."""
        scale = self.speaker_scale.get(speaker, 1.0) if speaker else 1.0
        return float(self._count(text) @ self.weights) * scale

    def to_json(self) -> str:
        """All of it, to the bit."""
        names = ("speaker_scale", "language", "added", "normalize")
        content = {"weights": self.weights.tolist()} | {name: getattr(self, name) for name in names}
        return json.dumps(content) + "\n"


def language_unlike_phones(dataset: Dataset, model: str) -> str:
    """The language label that most samples have, if it is another than that of the phones of [encoder] model; else
    empty. Only codes of two letters are compared: espeak-ng's "cmn" may be a list's "zh"."""
    codes, names = dataset.labels("language")
    most = int(np.bincount(codes + 1).argmax())  # the first are the samples without a label
    label = names[most - 1] if most else ""
    one, other = (re.split("[-_]", each.lower())[0] for each in (label, language_of(model)))
    return label if one != other and len(one) == len(other) == 2 else ""


def stored_durations(folder: Path) -> LinearDurationModel:
    """The fit in a run's folder or an exported one, as `to_json` gave it."""
    path = folder / DURATIONS_FILE
    with reading(path, "restore the file"):
        content = read_json_file(path)
        weights = np.array(content["weights"], np.float64)
        scale = {str(name): float(value) for name, value in content["speaker_scale"].items()}
        added = tuple(map(str, content.get("added", ())))
        language, normalize = (str(content.get(name, "")) for name in ("language", "normalize"))
        if weights.shape == (257,):  # as written before tokens counted
            weights = np.append(weights, np.zeros(len(added)))
        finite = np.isfinite([*weights.flat, *scale.values()]).all()
        if weights.shape != (257 + len(added),) or not finite:
            raise ValueError(f"it holds no {257 + len(added)} finite weights")
    return LinearDurationModel(weights, scale, language, added, normalize)


def solve(features: np.ndarray, frames: np.ndarray, ridge: float = _RIDGE) -> np.ndarray:
    """Weights (features, ...) of ridge regression on frames (samples, ...)."""
    gram = features.T @ features + ridge * np.eye(features.shape[1])
    return np.linalg.solve(gram, features.T @ frames)


def _shrunk(
    features: np.ndarray, frames: np.ndarray, medians: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and frames with texts above `medians` median lengths shrunk to that length, so that none bends
    the fit by its length alone."""
    lengths = features[:, :256].sum(1)
    factor = np.maximum(1.0, lengths / (medians * max(1.0, float(np.median(lengths)))))
    return features / factor[:, None], frames / factor


def fits(features: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """(samples,) bool, false where text and speech cannot belong together, as one transcript of a book for one sentence.
    They are found by a fit of their own, whose ridge lets letters in less than 1 % of the texts explain little."""
    rows, targets = _shrunk(features, frames, 1.0)
    distances = np.abs(targets - rows @ solve(rows, targets, max(_RIDGE, len(rows) / 100)))
    # Not below a frame: a fit that is exact for most is no reason to leave out a rounding.
    limit = _OUTLIER * max(1.0, 1.4826 * float(np.median(distances)))
    return distances <= limit


def read_evenly(
    dataset: Dataset, samples: np.ndarray | None = None
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """(JSON, frames (n,)) of the samples (m,), by default of all, or of an even selection where they are very many;
    corrupt ones are left out."""
    samples = np.arange(len(dataset.frames)) if samples is None else samples
    places = np.linspace(0, max(0, len(samples) - 1), min(len(samples), _MAX_SAMPLES))
    chosen = samples[np.unique(places.astype(np.int64))]
    found = read_metadata(dataset, chosen.tolist())
    metadata = [each for each in found if each is not None]
    return metadata, dataset.frames[chosen[[each is not None for each in found]]]


def fit_durations(
    dataset: Dataset,
    encoder: Encoder,
    base: LinearDurationModel | None = None,
    read: tuple[list[dict[str, Any]], np.ndarray] | None = None,
) -> LinearDurationModel:
    """Fit on texts and lengths, with the phones that the encoder has. Those that are far too long or short for each other
    are left out.

    Args:
        base: the fit of the weights that the run starts from. Few texts leave it as it was, and its voices keep their
            rates: that of new recordings belongs to their speakers, and is every voice's only if these have no names
            or are more than the base's.
        read: `read_evenly` of the dataset, if it was called already.
    """
    read_by = language_of(encoder.model), tuple(encoder.added_tokens), encoder.normalize
    count = Counter(*read_by)
    metadata, lengths = read or read_evenly(dataset)
    if not metadata:
        raise InputError("no sample to fit durations on; give data with valid texts")
    features = np.stack([count(m["text"]) for m in metadata])
    frames = lengths.astype(np.float64)
    good = fits(features, frames)
    features, frames = features[good], frames[good]
    names, codes = np.unique(
        [str(m.get("speaker", "")) for m, each in zip(metadata, good, strict=True) if each],
        return_inverse=True,
    )

    def rates(fitted: np.ndarray) -> np.ndarray:
        """(names,) of the speakers: real over fitted frames."""
        return np.bincount(codes, frames) / np.maximum(1.0, np.bincount(codes, fitted))

    rows, targets = _shrunk(features, frames, _MAX_LENGTH)
    known, ridge, old = np.zeros(features.shape[1]), _RIDGE, dict[str, float]()
    same = base is not None and (base.language, base.added, base.normalize) == read_by
    # The letters of phones take about as long in any language.
    if base is not None and (same or (base.language and read_by[0] and base.added == read_by[1])):
        ridge, new = _BASE_TEXTS, set(names.tolist()) - base.speaker_scale.keys()
        rate = float(frames.sum() / max(1.0, (features @ base.weights).sum()))
        if "" not in new and len(new) <= len(base.speaker_scale):
            # Beyond a factor of two it is no voice's pace, but letters that the base does not know.
            rate /= min(2.0, max(0.5, rate))
        known = base.weights * rate
        old = {name: each / rate for name, each in base.speaker_scale.items()}
        targets = targets / np.where(names == "", 1.0, rates(features @ known))[codes]
    weights = known + solve(rows, targets - rows @ known, ridge)
    own = zip(names.tolist(), rates(features @ weights).tolist(), strict=True)
    scale = old | {name: rate for name, rate in own if name}
    return LinearDurationModel(weights, scale, *read_by)
