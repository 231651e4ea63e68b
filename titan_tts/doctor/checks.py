"""Checks that make findings of indexes and measurements. No check reads the arrays."""

import os
from collections.abc import Callable

import numpy as np

from titan_tts.doctor.findings import Example, Finding, Limits, all_kinds
from titan_tts.doctor.scan import CORRUPT, READ, Measurements, decomposed, unspoken
from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.heldout import split_of
from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.files import is_remote, nfc
from torchtitan.models.dit_tts.text.durations import read_evenly
from torchtitan.models.dit_tts.text.matching import judge_texts
from torchtitan.models.dit_tts.text.normalize import Normalizer
from torchtitan.models.dit_tts.text.phones import Phonemizer, lost_letters
from torchtitan.models.dit_tts.text.token_counts import count_letters, count_text_tokens
from torchtitan.models.dit_tts.text.vocabulary import language_of, named

RECORD_NAME = "prepare.json"
# What the tokenizer puts around each text: begin and end.
EXTRA_TEXT_TOKENS = 2
# Frames by which a length may differ from its target_duration: one for rounding, one more.
DURATION_TOLERANCE = 2.0
# An outlier's logarithm is so many robust standard deviations from the median ...
OUTLIER_SIGMAS = 5.0
# ... and however alike the other samples are, a value within this factor of the median is none.
MIN_OUTLIER_RATIO = 2.0
# Peaks spread more than levels do.
MIN_PEAK_RATIO = 4.0
MAX_CLIPPED = 0.01
EXAMPLES = 20  # of a finding

# A problem's kind in data/shard.py -> code.
_PROBLEM_CODES = {
    "shard": "corrupt_shard",
    "incomplete": "unusable_sample",
    "not_finite": "not_finite",
    "changed": "corrupt_sample",
    "unreadable": "corrupt_sample",
    "unusable": "unusable_sample",
}


def check_dataset(dataset: Dataset, measured: Measurements, limits: Limits) -> list[Finding]:
    """All checks, the worst findings first."""
    checks = _Checks(dataset, measured, limits)
    checks.shards()
    checks.lengths()
    checks.speech_rates()
    checks.texts()
    checks.speakers()
    checks.arrays()
    checks.durations()
    checks.references()
    checks.duplicates()
    return [finding for finding in checks.findings.values() if finding.count]


class _Checks:
    def __init__(self, dataset: Dataset, measured: Measurements, limits: Limits):
        self.dataset, self.measured, self.limits = dataset, measured, limits
        self.rows, self.findings = measured.rows, all_kinds()

    def add(self, code: str, count: int, examples: list[Example]) -> None:
        """Cases of one kind of fault; several calls add up."""
        finding = self.findings[code]
        finding.count += count
        finding.examples += examples[: EXAMPLES - len(finding.examples)]

    def add_samples(
        self,
        code: str,
        samples: np.ndarray,
        detail: Callable[[int], str],
        score: np.ndarray | None = None,
    ) -> None:
        """Cases that are samples (k,); those with the highest score (k,), if given, are shown first."""
        order = np.arange(len(samples)) if score is None else np.argsort(-score, kind="stable")
        shown = [int(sample) for sample in samples[order[:EXAMPLES]]]
        examples = [Example(self.dataset.sample_id(one), detail(one)) for one in shown]
        self.add(code, len(samples), examples)

    def shards(self) -> None:
        """Shards and samples that the indexes refused, and local shards against the prepare.json of their folder or the
        one above."""
        dataset = self.dataset
        names = dict(zip(dataset.tar_paths, dataset.shard_names, strict=True))
        for tar_path, problem in dataset.problems:
            where = f"{names[tar_path]}:{problem.key}" if problem.key else tar_path
            self.add(_PROBLEM_CODES[problem.kind], 1, [Example(where, problem.sentence)])
        sizes = dict(zip(dataset.tar_paths, dataset.tar_bytes, strict=True))
        recorded: dict[str, int] = {}
        for folder in {os.path.dirname(path) for path in sizes if not is_remote(path)}:
            recorded |= _recorded_sizes(folder)
        for path, size in sorted(recorded.items()):
            there = sizes.get(path, size if os.path.exists(path) else "no")
            if there != size:
                example = Example(path, f"{there} bytes, but {RECORD_NAME} has {size}")
                self.add("shard_changed", 1, [example])

    def lengths(self) -> None:
        tokens, limits = text_tokens(self.dataset, self.limits), self.limits
        for code, unit, lengths, limit in (
            ("long_latents", "frames", self.dataset.frames, limits.max_frames or Data.max_frames),
            ("long_text", "tokens", tokens, limits.max_text_tokens or Data.max_text_tokens),
        ):
            long = np.flatnonzero(lengths > limit)
            self.add_samples(code, long, lambda one: f"{lengths[one]} {unit}", lengths[long])

    def speech_rates(self) -> None:
        """Each language is compared with itself: Chinese has three characters where English has ten."""
        seconds = np.maximum(self.dataset.frames, 1) / self.limits.frames_per_second
        rate = self.dataset.text_chars / seconds
        distance, centre = np.zeros(len(rate)), np.zeros(len(rate))
        languages, _ = self.dataset.labels("language")
        for language in np.unique(languages):
            group = np.flatnonzero(languages == language)
            # A text without a character is another finding.
            found, limit, centre[group] = log_distance(
                rate[group], rate[group] > 0, MIN_OUTLIER_RATIO
            )
            distance[group] = np.where(found > limit, found, 0)

        def detail(one: int) -> str:
            value, median = f"{rate[one]:.1f}", f"{centre[one]:.1f}"
            return f"{value} characters per second, the median of its language is {median}"

        cases = np.flatnonzero(distance)
        self.add_samples("chars_per_second_outlier", cases, detail, distance[cases])

    def texts(self) -> None:
        """Lengths of the texts against those of their recordings, and what is written and not said, or cannot be."""
        dataset, rows, metadata = self.dataset, self.rows, self.dataset.metadata
        read = np.flatnonzero(rows["state"] == READ)
        for match in judge_texts(*read_evenly(dataset, read)):
            if match.verdict:
                self.add(match.verdict, match.count, [Example(match.where, str(match))])
        for code, column, detail in (
            ("empty_text", "blank_text", lambda one: "its text is empty"),
            ("unspoken_parts", "unspoken", lambda one: unspoken(metadata(one))),
            ("not_nfc", "decomposed", lambda one: _composed(decomposed(metadata(one)))),
        ):
            self.add_samples(code, self.measured.where(rows[column]), detail)
        if language := language_of(self.limits.text_unit):
            lost = lost_letters(dataset, Phonemizer(language))
            self.add_samples("lost_letters", np.array([*lost], int), lambda one: named(lost[one]))

    def speakers(self) -> None:
        codes, values = self.dataset.labels("speaker")
        counts = np.bincount(codes[codes >= 0], minlength=len(values) or 1)
        single = np.flatnonzero((codes >= 0) & (counts[codes] == 1))
        self.add_samples(
            "single_utterance_speaker", single, lambda one: f"speaker '{values[codes[one]]}'"
        )

    def arrays(self) -> None:
        """Samples that could not be read, and values of the arrays that were read."""
        measured, rows, frames = self.measured, self.rows, self.dataset.frames
        corrupt = np.flatnonzero(rows["state"] == CORRUPT)
        self.add_samples("corrupt_sample", corrupt, lambda one: measured.messages.get(one, ""))
        constant = measured.where(rows["constant"])
        self.add_samples("constant_latents", constant, lambda one: f"{frames[one]} frames")
        share = rows["clipped"]
        clipped = measured.where(share > MAX_CLIPPED)
        self.add_samples("clipped", clipped, lambda one: f"{share[one]:.1%}", share[clipped])
        valid = (rows["state"] == READ) & ~rows["constant"]
        for code, name, word, ratio in (
            ("std_outlier", "std", "standard deviation", MIN_OUTLIER_RATIO),
            ("peak_outlier", "peak", "maximum magnitude", MIN_PEAK_RATIO),
        ):
            values = rows[name].astype(np.float64)
            distance, limit, centre = log_distance(values, valid, ratio)
            # A small maximum is a matter of level.
            cases = np.flatnonzero((distance > limit) & ((name == "std") | (values > centre)))
            self.add_samples(
                code,
                cases,
                lambda one: f"{word} {values[one]:.3g}, the median is {centre:.3g}",
                distance[cases],
            )

    def durations(self) -> None:
        """Lengths against the durations in the JSON."""
        measured, fps, frames = self.measured, self.limits.frames_per_second, self.dataset.frames
        duration = self.rows["duration"]
        excess = np.abs(frames - duration * fps)
        mismatch = measured.where(excess > DURATION_TOLERANCE)
        rate = measured_frame_rate(self.dataset, measured, fps)

        def detail(one: int) -> str:
            seconds = duration[one]
            return (
                f"{frames[one]} frames for {seconds:.3f} seconds, which are {seconds * fps:.1f} frames "
                f"at {fps:g} per second (the median sample has {rate:.4g} per second)"
            )

        self.add_samples("duration_mismatch", mismatch, detail, excess[mismatch])

    def references(self) -> None:
        measured, lengths = self.measured, self.dataset.reference_frames
        for code, column, words in (
            ("constant_reference", "constant_reference", "{} reference frames"),
            ("reference_from_target", "leak", "of its {} reference frames some are its target's"),
        ):
            cases = measured.where(self.rows[column])
            self.add_samples(code, cases, lambda one: words.format(lengths[one]))

    def duplicates(self) -> None:
        """Repeated latents, and latents both in a folder with a held-out split's name and in another folder."""
        dataset, name = self.dataset, self.dataset.sample_id
        hashes = dataset.latents_hash
        _, start, group = np.unique(hashes, return_index=True, return_inverse=True)
        first = start[group]  # the first sample with each hash
        latents = np.flatnonzero(first != np.arange(len(hashes)))
        self.add_samples(
            "duplicate_latents", latents, lambda one: f"the latents of {name(int(first[one]))}"
        )
        folders = [os.path.dirname(os.path.abspath(plain_name(one))) for one in dataset.tar_paths]
        names = map(os.path.basename, folders)
        held = np.array([split_of(name) == "heldout" for name in names])[dataset.shard]
        training = np.flatnonzero(~held)
        shared = np.flatnonzero(held & np.isin(hashes, hashes[training]))

        def other(one: int) -> str:
            return f"the latents of {name(int(training[hashes[training] == hashes[one]][0]))}"

        self.add_samples("heldout_in_training", shared, other)


def _composed(word: str) -> str:
    return f"{ascii(word)}, which prepare writes as {ascii(nfc(word))} ({nfc(word)})"


def _recorded_sizes(folder: str) -> dict[str, int]:
    """Bytes of the shards of `folder` by path, as the nearest prepare.json lists them; else {}."""
    for parent in (folder, os.path.dirname(folder)):
        try:
            shards = read_json_file(os.path.join(parent, RECORD_NAME))["shards"]
            sizes = {os.path.join(parent, name): int(one["bytes"]) for name, one in shards.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        return {path: size for path, size in sizes.items() if os.path.dirname(path) == folder}
    return {}


def text_tokens(dataset: Dataset, limits: Limits) -> np.ndarray:
    """(n,) tokens of every text, as training counts them. Phones are counted once and stored next to the indexes."""
    words = Normalizer(limits.normalize)
    if language := language_of(limits.text_unit):
        units = count_text_tokens(dataset, Phonemizer(language), words=words)
    else:
        units = count_letters(dataset, limits.text_unit, (0, 1), words)
    return units.astype(np.int64) + EXTRA_TEXT_TOKENS


def measured_frame_rate(
    dataset: Dataset, measured: Measurements, frames_per_second: float
) -> float | None:
    """Median of frames over target_duration; None where no sample has one."""
    duration = measured.rows["duration"]
    known = measured.where(duration > 0)
    if not len(known):
        return None
    frames, seconds = dataset.frames[known], duration[known]
    # Rounding up makes the quotient of short samples a little larger.
    if np.median(np.abs(frames - seconds * frames_per_second)) <= 1:
        return frames_per_second
    return float(np.median(frames / seconds))


def log_distance(
    values: np.ndarray, valid: np.ndarray, min_ratio: float
) -> tuple[np.ndarray, float, float]:
    """(distance (n,), limit, median): an outlier's logarithm is farther from the median than limit.

    The limit is `OUTLIER_SIGMAS` robust standard deviations (1.4826 times the median absolute deviation) of
    the logarithm, and at least log(`min_ratio`). Where not `valid` (positive values) the distance is 0.
    """
    distance = np.zeros(len(values))
    if not valid.any():
        return distance, np.inf, np.nan
    logs = np.log(np.maximum(values[valid].astype(np.float64), 1e-30))
    centre = float(np.median(logs))
    distance[valid] = np.abs(logs - centre)
    spread = 1.4826 * float(np.median(distance[valid]))
    return distance, max(OUTLIER_SIGMAS * spread, float(np.log(min_ratio))), float(np.exp(centre))
