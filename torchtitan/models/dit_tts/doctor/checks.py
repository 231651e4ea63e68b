"""From indexes and measurements to findings. Each function is one concern, none reads the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.doctor.findings import KINDS, Example, Finding, finding_of
from torchtitan.models.dit_tts.doctor.scan import (
    ALL_ZERO,
    CHANGING,
    CONSTANT,
    DAMAGED,
    NAMED,
    OTHER,
    Measurements,
)

# Of a problem's kind in data/members.py.
_PROBLEM_CODES = {
    "shard": "damaged_shard",
    "incomplete": "incomplete_sample",
    "not_finite": "not_finite",
    "changed": "damaged_sample",
    "unreadable": "damaged_sample",
    "unusable": "unusable_sample",
}

# A spread of lengths or levels as wide as this is no fault, however alike the other samples are.
LEAST_OUTLIER_RATIO = 2.0
# Peaks spread more than levels do.
LEAST_PEAK_RATIO = 4.0


@dataclass(frozen=True)
class Limits:
    """What counts as a fault.

    Attributes:
        frames_per_second: latent frames a second of audio.
        max_frames, max_text_tokens: as in ``[data]``.
        text_unit: "bytes" or "chars", what the tokenizer makes a token of.
        extra_text_tokens: tokens it puts around each text.
        duration_tolerance: frames by which a length may miss its target_duration, beyond the one
            that rounding takes.
        outlier_sigmas: robust standard deviations of the logarithm from which it is an outlier.
        min_chars_per_second, max_chars_per_second: absolute limits instead, 0 for none.
        max_examples: samples named a finding.
    """

    frames_per_second: float = 25.0
    max_frames: int = 768
    max_text_tokens: int = 192
    text_unit: str = "bytes"
    extra_text_tokens: int = 2
    duration_tolerance: float = 1.0
    outlier_sigmas: float = 5.0
    min_chars_per_second: float = 0.0
    max_chars_per_second: float = 0.0
    max_examples: int = 20


def text_tokens(dataset: Dataset, limits: Limits) -> np.ndarray:
    """(n,) tokens of every text."""
    units = dataset.text_chars if limits.text_unit == "chars" else dataset.text_bytes
    return units.astype(np.int64) + limits.extra_text_tokens


def problem_findings(dataset: Dataset, limits: Limits) -> list[Finding]:
    """What the indexes could not use."""
    cases: dict[str, list[Example]] = {}
    names = dict(zip(dataset.tar_paths, dataset.shard_names, strict=True))
    for tar_path, problem in dataset.problems:
        where = f"{names[tar_path]}:{problem.key}" if problem.key else tar_path
        code = _PROBLEM_CODES[problem.kind]
        cases.setdefault(code, []).append(Example(where, problem.sentence))
    return [
        Finding(KINDS[code], len(examples), tuple(examples[: limits.max_examples]))
        for code, examples in cases.items()
    ]


def length_findings(dataset: Dataset, limits: Limits) -> list[Finding]:
    """Lengths of latents, references and texts, from the index."""
    most = limits.max_examples
    tokens = text_tokens(dataset, limits)
    long_latents = np.flatnonzero(dataset.frames > limits.max_frames)
    long_text = np.flatnonzero(tokens > limits.max_text_tokens)

    def frames(sample: int) -> Example:
        return Example(dataset.sample_id(sample), f"{dataset.frames[sample]} frames")

    def text(sample: int) -> Example:
        return Example(dataset.sample_id(sample), f"{tokens[sample]} tokens")

    without = np.flatnonzero(dataset.reference_frames == 0)
    return [
        *finding_of("long_latents", long_latents, frames, most, score=dataset.frames[long_latents]),
        *finding_of("long_text", long_text, text, most, score=tokens[long_text]),
        *finding_of("no_reference", without, frames, most),
    ]


def speech_rate_findings(dataset: Dataset, limits: Limits) -> list[Finding]:
    """Characters a second, from the index; texts without a character are another finding.

    Each language is compared with itself: Chinese has three characters where English has ten.
    """
    rate = characters_per_second(dataset, limits.frames_per_second)
    distance, outside, centre = np.zeros(len(rate)), np.zeros(len(rate), bool), np.zeros(len(rate))
    languages, _ = dataset.labels("language")
    order = np.argsort(languages, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(languages[order])) + 1):
        distance[group], limit, centre[group] = log_distance(
            rate[group], rate[group] > 0, limits.outlier_sigmas, LEAST_OUTLIER_RATIO
        )
        outside[group] = distance[group] > limit
    low, high = limits.min_chars_per_second, limits.max_chars_per_second
    if low or high:
        outside = (rate > 0) & ((rate < low) | (rate > (high or np.inf)))
    cases = np.flatnonzero(outside)
    several = bool((languages != languages[:1]).any())

    def example(sample: int) -> Example:
        of = "of its language " if several else ""
        return Example(
            dataset.sample_id(sample),
            f"{rate[sample]:.1f} characters a second, the median {of}is {centre[sample]:.1f}",
        )

    return finding_of(
        "chars_per_second_outlier", cases, example, limits.max_examples, score=distance[cases]
    )


def duplicate_findings(dataset: Dataset, limits: Limits) -> list[Finding]:
    """The same latents or the same key again, from the index."""
    latents, latents_first = repeats(dataset.latents_hash)
    # Within a shard a key cannot come twice.
    keys, keys_first = repeats(_key_hashes(dataset))

    def same(first: np.ndarray, what: str):
        return lambda sample: Example(
            dataset.sample_id(sample), f"{what} {dataset.sample_id(int(first[sample]))}"
        )

    most = limits.max_examples
    return [
        *finding_of("duplicate_latents", latents, same(latents_first, "the latents of"), most),
        *finding_of("duplicate_keys", keys, same(keys_first, "the key of"), most),
    ]


def speaker_findings(dataset: Dataset, limits: Limits) -> list[Finding]:
    """Speakers, from the index."""
    codes, values = dataset.labels("speaker")
    without = np.flatnonzero(codes < 0)
    counts = np.bincount(codes[codes >= 0], minlength=len(values))
    single = np.flatnonzero((codes >= 0) & (counts[codes] == 1)) if len(values) else without[:0]

    def speaker(sample: int) -> Example:
        return Example(dataset.sample_id(sample), f"speaker '{values[codes[sample]]}'")

    def nameless(sample: int) -> Example:
        return Example(dataset.sample_id(sample), "no speaker in its JSON")

    most = limits.max_examples
    return [
        *finding_of("single_utterance_speaker", single, speaker, most),
        *finding_of("no_speaker", without, nameless, most),
    ]


def read_findings(dataset: Dataset, found: Measurements, limits: Limits) -> list[Finding]:
    """Samples that could not be read as they were written."""

    def example(sample: int) -> Example:
        return Example(dataset.sample_id(sample), found.sentences.get(sample, ""))

    damaged = np.flatnonzero(found.rows["state"] == DAMAGED)
    return finding_of("damaged_sample", damaged, example, limits.max_examples)


def array_findings(dataset: Dataset, found: Measurements, limits: Limits) -> list[Finding]:
    """Values of the arrays that were read."""
    rows, most = found.rows, limits.max_examples
    changing = found.where(rows["latents"] == CHANGING)
    flat_references = found.where(rows["reference"] != CHANGING)

    def frames(sample: int) -> Example:
        return Example(dataset.sample_id(sample), f"{dataset.frames[sample]} frames")

    def reference(sample: int) -> Example:
        return Example(
            dataset.sample_id(sample), f"{dataset.reference_frames[sample]} reference frames"
        )

    findings = [
        *finding_of("zero_latents", found.where(rows["latents"] == ALL_ZERO), frames, most),
        *finding_of("constant_latents", found.where(rows["latents"] == CONSTANT), frames, most),
        *finding_of("constant_reference", flat_references, reference, most),
    ]
    valid = np.zeros(len(rows), bool)
    valid[changing] = True
    for code, name, ratio in (
        ("std_outlier", "std", LEAST_OUTLIER_RATIO),
        ("peak_outlier", "peak", LEAST_PEAK_RATIO),
    ):
        values = rows[name].astype(np.float64)
        distance, limit, centre = log_distance(values, valid, limits.outlier_sigmas, ratio)
        word = "standard deviation" if name == "std" else "largest magnitude"
        cases = np.flatnonzero(distance > limit)
        if name == "peak":  # a small largest value is a matter of level
            cases = cases[values[cases] > centre]
        findings += finding_of(
            code,
            cases,
            lambda sample, values=values, centre=centre, word=word: Example(
                dataset.sample_id(sample),
                f"{word} {values[sample]:.3g}, the median is {centre:.3g}",
            ),
            most,
            score=distance[cases],
        )
    return findings


def channel_findings(found: Measurements, limits: Limits) -> list[Finding]:
    """Channels without any change over all frames that were read."""
    if found.channels.frames < 2:
        return []
    lowest = found.channels.lowest
    dead = np.flatnonzero(lowest == found.channels.highest)
    return finding_of(
        "constant_channel",
        dead,
        lambda channel: Example(f"channel {channel}", f"always {lowest[channel]:.4g}"),
        limits.max_examples,
    )


def metadata_findings(dataset: Dataset, found: Measurements, limits: Limits) -> list[Finding]:
    """Texts, durations and references, from the JSON that was read."""
    rows, most = found.rows, limits.max_examples
    duration = rows["duration"]
    stated = duration * limits.frames_per_second
    excess = np.abs(dataset.frames - stated)
    mismatch = found.where((duration > 0) & (excess > 1 + limits.duration_tolerance))
    rate = measured_frame_rate(dataset, found, limits.frames_per_second)
    texts, texts_first = repeats(rows["text_hash"], found.where(~rows["blank_text"]))

    def named(sample: int) -> str:
        return dataset.sample_id(sample)

    def length(sample: int) -> Example:
        return Example(
            named(sample),
            f"{dataset.frames[sample]} frames for {duration[sample]:.3f} seconds, which are "
            f"{stated[sample]:.1f} frames at {limits.frames_per_second:g} a second"
            + (f" (the median sample has {rate:.4g} a second)" if rate else ""),
        )

    def source(sample: int) -> Example:
        by_name = rows["reference_source"][sample] == NAMED
        return Example(
            named(sample),
            "its reference_key is its own key" if by_name else "its reference is a part of it",
        )

    def same_text(sample: int) -> Example:
        return Example(named(sample), f"speaker and text of {named(int(texts_first[sample]))}")

    def plain(detail: str):
        return lambda sample: Example(named(sample), detail)

    return [
        *finding_of(
            "empty_text", found.where(rows["blank_text"]), plain("its text is empty"), most
        ),
        *finding_of("duration_mismatch", mismatch, length, most, score=excess[mismatch]),
        *finding_of(
            "bad_duration",
            found.where(duration == -1),
            plain("its target_duration is no positive number"),
            most,
        ),
        *finding_of(
            "no_duration", found.where(np.isnan(duration)), plain("no target_duration"), most
        ),
        *finding_of(
            "reference_from_target",
            found.where(rows["reference_source"] != OTHER),
            source,
            most,
        ),
        *finding_of("duplicate_text", texts, same_text, most),
    ]


def all_findings(
    dataset: Dataset, found: Measurements, limits: Limits, others: Sequence[Finding] = ()
) -> list[Finding]:
    """Every check; ``others`` are findings made elsewhere. Those of one kind become one."""
    merged: dict[str, Finding] = {}
    for finding in (
        *problem_findings(dataset, limits),
        *length_findings(dataset, limits),
        *speech_rate_findings(dataset, limits),
        *duplicate_findings(dataset, limits),
        *speaker_findings(dataset, limits),
        *read_findings(dataset, found, limits),
        *array_findings(dataset, found, limits),
        *channel_findings(found, limits),
        *metadata_findings(dataset, found, limits),
        *others,
    ):
        known = merged.get(finding.kind.code)
        if known is not None:
            examples = (known.examples + finding.examples)[: limits.max_examples]
            finding = Finding(finding.kind, known.count + finding.count, examples)
        merged[finding.kind.code] = finding
    return list(merged.values())


def characters_per_second(dataset: Dataset, frames_per_second: float) -> np.ndarray:
    """(n,) characters of the text a second of latents."""
    return dataset.text_chars * frames_per_second / np.maximum(dataset.frames, 1)


def measured_frame_rate(
    dataset: Dataset, found: Measurements, frames_per_second: float
) -> float | None:
    """Median of frames over target_duration; None where no sample has one.

    It is ``frames_per_second`` itself where most samples have that to within a frame: rounding up
    makes the quotient of short samples a little larger.
    """
    duration = found.rows["duration"]
    known = found.where(duration > 0)
    if not len(known):
        return None
    frames, seconds = dataset.frames[known], duration[known]
    if np.median(np.abs(frames - seconds * frames_per_second)) <= 1:
        return frames_per_second
    return float(np.median(frames / seconds))


def log_distance(
    values: np.ndarray, valid: np.ndarray, sigmas: float, least_ratio: float
) -> tuple[np.ndarray, float, float]:
    """(distance (n,), limit, median): an outlier's logarithm is farther from the median than limit.

    The limit is ``sigmas`` robust standard deviations (1.4826 times the median absolute deviation)
    of the logarithm, and never below that of ``least_ratio``. Where not ``valid`` (positive values)
    the distance is 0.
    """
    distance = np.zeros(len(values))
    if not valid.any():
        return distance, np.inf, np.nan
    logs = np.log(np.maximum(values[valid].astype(np.float64), 1e-30))
    centre = float(np.median(logs))
    distance[valid] = np.abs(logs - centre)
    spread = 1.4826 * float(np.median(distance[valid]))
    return distance, max(sigmas * spread, float(np.log(least_ratio))), float(np.exp(centre))


def repeats(hashes: np.ndarray, samples: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Which samples have the hash of an earlier one.

    Args:
        hashes: (n,) one a sample.
        samples: (m,) ascending numbers of those that count; None: all.

    Returns:
        (k,) ascending numbers of the repeats, and (n,) the first sample with each one's hash.
    """
    samples = np.arange(len(hashes)) if samples is None else samples
    first = np.arange(len(hashes))
    _, start, group = np.unique(hashes[samples], return_index=True, return_inverse=True)
    first[samples] = samples[start[group]]
    return samples[first[samples] != samples], first


def _key_hashes(dataset: Dataset) -> np.ndarray:
    """(n,) of the samples' keys, 8 bytes each instead of a string."""
    count = len(dataset)
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(dataset.key(sample).encode()) for sample in range(count)),
        np.uint64,
        count,
    )
