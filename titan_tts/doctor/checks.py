"""From indexes and measurements to findings. No check reads the arrays."""

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from titan_tts.doctor.findings import Example, Finding, Limits, all_kinds
from titan_tts.doctor.scan import (
    ALL_ZERO,
    CHANGING,
    CONSTANT,
    CORRUPT,
    NAMED,
    OTHER,
    READ,
    Measurements,
    decomposed,
    unspoken,
)
from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.heldout import split_of
from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.files import is_remote, nfc
from torchtitan.models.dit_tts.text.durations import read_evenly
from torchtitan.models.dit_tts.text.matching import judge_texts
from torchtitan.models.dit_tts.text.phones import Phonemizer, lost_letters
from torchtitan.models.dit_tts.text.token_counts import count_text_tokens
from torchtitan.models.dit_tts.text.vocabulary import language_of, named

RECORD_NAME = "prepare.json"
# What the tokenizer puts around each text: begin and end.
EXTRA_TEXT_TOKENS = 2
# Frames by which a length may differ from its target_duration: one for rounding, one more.
DURATION_TOLERANCE = 2.0
# However alike the other samples are, a value within this factor of the median is no outlier.
MIN_OUTLIER_RATIO = 2.0
# Recordings that begin, or end, like speech are taken for cut ones from this fraction of all on, and where their
# letters have less than this part of their time: 0.88 and more where right ones were trimmed tightly, up to 0.81 where
# half lack 0.3 s.
MIN_CUT_FRACTION = 0.02
MAX_CUT_TIME = 0.85
# Peaks spread more than levels do.
MIN_PEAK_RATIO = 4.0

# A problem's kind in data/shard.py -> code.
_PROBLEM_CODES = {
    "shard": "corrupt_shard",
    "incomplete": "incomplete_sample",
    "not_finite": "not_finite",
    "changed": "corrupt_sample",
    "unreadable": "corrupt_sample",
    "unusable": "unusable_sample",
}


def check_dataset(dataset: Dataset, measured: Measurements, limits: Limits) -> list[Finding]:
    """All checks, the worst findings first."""
    check = _Checks(dataset, measured, limits)
    check.index_problems()
    check.prepare_record()
    check.lengths()
    check.speech_rates()
    check.texts()
    check.speakers()
    check.arrays()
    check.durations()
    check.references()
    check.duplicates()
    check.unicode()
    check.spoken()
    check.held_out()
    return [finding for finding in check.findings.values() if finding.count]


class _Checks:
    def __init__(self, dataset: Dataset, measured: Measurements, limits: Limits):
        self.dataset, self.measured, self.limits = dataset, measured, limits
        self.findings = all_kinds()

    def add(self, code: str, count: int, examples: list[Example]) -> None:
        """Cases of one kind of fault; several calls add up."""
        finding = self.findings[code]
        finding.count += count
        finding.examples += examples[: self.limits.examples - len(finding.examples)]

    def add_samples(
        self,
        code: str,
        samples: np.ndarray,
        detail: Callable[[int], str],
        score: np.ndarray | None = None,
    ) -> None:
        """Cases that are samples (k,); those with the highest score (k,), if given, are shown first."""
        order = np.arange(len(samples)) if score is None else np.argsort(-score, kind="stable")
        shown = [int(sample) for sample in samples[order[: self.limits.examples]]]
        examples = [Example(self.dataset.sample_id(one), detail(one)) for one in shown]
        self.add(code, len(samples), examples)

    def index_problems(self) -> None:
        """Shards and samples that the indexes refused."""
        names = dict(zip(self.dataset.tar_paths, self.dataset.shard_names, strict=True))
        for tar_path, problem in self.dataset.problems:
            where = f"{names[tar_path]}:{problem.key}" if problem.key else tar_path
            self.add(_PROBLEM_CODES[problem.kind], 1, [Example(where, problem.sentence)])

    def prepare_record(self) -> None:
        """Local shards against the sizes in the prepare.json of their folder or the one above."""
        sizes = dict(zip(self.dataset.tar_paths, self.dataset.tar_bytes, strict=True))
        recorded: dict[str, int] = {}
        for folder in {os.path.dirname(path) for path in sizes if not is_remote(path)}:
            recorded |= _recorded_sizes(folder)
        for path, size in sorted(recorded.items()):
            if path not in sizes and not os.path.exists(path):
                example = Example(path, f"{RECORD_NAME} lists it, but it does not exist")
                self.add("shard_missing", 1, [example])
            elif sizes.get(path, size) != size:
                example = Example(path, f"{sizes[path]} bytes, but {RECORD_NAME} has {size}")
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
        rate = characters_per_second(self.dataset, self.limits.frames_per_second)
        distance, centre = np.zeros(len(rate)), np.zeros(len(rate))
        outside = np.zeros(len(rate), bool)
        languages, _ = self.dataset.labels("language")
        order = np.argsort(languages, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(languages[order])) + 1):
            # A text without a character is another finding.
            distance[group], limit, centre[group] = log_distance(
                rate[group], rate[group] > 0, self.limits.outlier_sigmas, MIN_OUTLIER_RATIO
            )
            outside[group] = distance[group] > limit

        def detail(one: int) -> str:
            value, median = f"{rate[one]:.1f}", f"{centre[one]:.1f}"
            return f"{value} characters per second, the median of its language is {median}"

        cases = np.flatnonzero(outside)
        self.add_samples("chars_per_second_outlier", cases, detail, distance[outside])

    def texts(self) -> None:
        """Lengths of the texts against those of their recordings, and recordings that end before their text."""
        read = np.flatnonzero(self.measured.rows["state"] == READ)
        for match in judge_texts(*read_evenly(self.dataset, read)):
            if match.verdict:
                self.add(match.verdict, match.count, [Example(match.where, str(match))])
        for code, name in (("cut_start", "start"), ("cut_end", "end")):
            time = self.measured.rows[name]
            cut = self.measured.where(time > 0)
            if len(cut) > MIN_CUT_FRACTION * len(read) and np.median(time[cut]) < MAX_CUT_TIME:
                self.add_samples(code, cut, partial(self.cut_text, name), -time[cut])

    def cut_text(self, side: str, one: int) -> str:
        text = self.dataset.metadata(one)["text"].strip()
        shown = f"{text[:12]}..." if side == "start" else f"...{text[-12:]}"
        time = self.measured.rows[side][one]
        return f"{shown!r}, whose {side} has {time:.0%} of the usual time of its letters and no pause around it"

    def speakers(self) -> None:
        codes, values = self.dataset.labels("speaker")
        counts = np.bincount(codes[codes >= 0], minlength=len(values) or 1)
        single = np.flatnonzero((codes >= 0) & (counts[codes] == 1))
        self.add_samples(
            "single_utterance_speaker", single, lambda one: f"speaker '{values[codes[one]]}'"
        )
        without = np.flatnonzero(codes < 0)
        self.add_samples("no_speaker", without, lambda one: "no speaker in its JSON")

    def arrays(self) -> None:
        """Samples that could not be read, and values of the arrays that were read."""
        measured, rows, frames = self.measured, self.measured.rows, self.dataset.frames
        corrupt = np.flatnonzero(rows["state"] == CORRUPT)
        self.add_samples("corrupt_sample", corrupt, lambda one: measured.messages.get(one, ""))
        for code, state in (("zero_latents", ALL_ZERO), ("constant_latents", CONSTANT)):
            cases = measured.where(rows["latents"] == state)
            self.add_samples(code, cases, lambda one: f"{frames[one]} frames")
        valid = np.zeros(len(rows), bool)
        valid[measured.where(rows["latents"] == CHANGING)] = True
        for code, name, word, ratio in (
            ("std_outlier", "std", "standard deviation", MIN_OUTLIER_RATIO),
            ("peak_outlier", "peak", "maximum magnitude", MIN_PEAK_RATIO),
        ):
            values = rows[name].astype(np.float64)
            distance, limit, centre = log_distance(values, valid, self.limits.outlier_sigmas, ratio)
            cases = np.flatnonzero(distance > limit)
            if name == "peak":  # a small maximum is a matter of level
                cases = cases[values[cases] > centre]
            self.add_samples(
                code,
                cases,
                lambda one: f"{word} {values[one]:.3g}, the median is {centre:.3g}",
                distance[cases],
            )

        many = frames[rows["state"] == READ].sum() > 1
        dead = np.flatnonzero((measured.lowest == measured.highest) & many)
        examples = [Example(f"channel {one}", f"always {measured.lowest[one]:.4g}") for one in dead]
        self.add("constant_channel", len(dead), examples)

    def durations(self) -> None:
        """Lengths against the durations in the JSON."""
        measured, fps, frames = self.measured, self.limits.frames_per_second, self.dataset.frames
        duration = measured.rows["duration"]
        excess = np.abs(frames - duration * fps)
        mismatch = measured.where((duration > 0) & (excess > DURATION_TOLERANCE))
        rate = measured_frame_rate(self.dataset, measured, fps)

        def detail(one: int) -> str:
            seconds = duration[one]
            return (
                f"{frames[one]} frames for {seconds:.3f} seconds, which are {seconds * fps:.1f} frames "
                f"at {fps:g} per second (the median sample has {rate:.4g} per second)"
            )

        self.add_samples("duration_mismatch", mismatch, detail, excess[mismatch])
        bad, absent = measured.where(duration == -1), measured.where(np.isnan(duration))
        self.add_samples("bad_duration", bad, lambda one: "no positive number")
        self.add_samples("no_duration", absent, lambda one: "no target_duration")

    def references(self) -> None:
        measured, rows, lengths = self.measured, self.measured.rows, self.dataset.reference_frames
        empty = np.flatnonzero(lengths == 0)
        constant = measured.where(rows["reference"] != CHANGING)
        self.add_samples("no_reference", empty, lambda one: "an empty reference")
        self.add_samples(
            "constant_reference", constant, lambda one: f"{lengths[one]} reference frames"
        )
        leaks = measured.where((rows["reference_source"] != OTHER) & (lengths > 0))

        def detail(one: int) -> str:
            if rows["reference_source"][one] == NAMED:
                return "its reference_key is its own key"
            return "its reference has frames of its latents"

        self.add_samples("reference_from_target", leaks, detail)

    def duplicates(self) -> None:
        """Repeated latents, repeated texts and empty texts."""
        measured, rows, name = self.measured, self.measured.rows, self.dataset.sample_id
        blank = measured.where(rows["blank_text"])
        latents, first = repeats(self.dataset.latents_hash)
        self.add_samples(
            "duplicate_latents", latents, lambda one: f"the latents of {name(first[one])}"
        )
        texts, first_text = repeats(rows["text_hash"], measured.where(~rows["blank_text"]))
        self.add_samples(
            "duplicate_text", texts, lambda one: f"speaker and text of {name(first_text[one])}"
        )
        self.add_samples("empty_text", blank, lambda one: "its text is empty")

    def unicode(self) -> None:
        def detail(one: int) -> str:
            word = decomposed(self.dataset.metadata(one))
            return f"{ascii(word)}, which prepare writes as {ascii(nfc(word))} ({nfc(word)})"

        rows = self.measured.rows
        self.add_samples("not_nfc", self.measured.where(rows["decomposed"]), detail)

    def spoken(self) -> None:
        """What is written and not said, or cannot be."""
        dataset = self.dataset
        parts = self.measured.where(self.measured.rows["unspoken"])
        self.add_samples("unspoken_parts", parts, lambda one: unspoken(dataset.metadata(one)))
        if language := language_of(self.limits.text_unit):
            lost = lost_letters(dataset, Phonemizer(language))
            self.add_samples("lost_letters", np.array([*lost], int), lambda one: named(lost[one]))

    def held_out(self) -> None:
        """Latents both in a folder with a held-out split's name and in another folder."""
        dataset = self.dataset
        folders = [os.path.dirname(os.path.abspath(plain_name(one))) for one in dataset.tar_paths]
        names = map(os.path.basename, folders)
        held = np.array([split_of(name) == "heldout" for name in names])[dataset.shard]
        hashes, training = dataset.latents_hash, np.flatnonzero(~held)
        shared = np.flatnonzero(held & np.isin(hashes, hashes[training]))

        def detail(one: int) -> str:
            other = int(training[hashes[training] == hashes[one]][0])
            return f"the latents of {dataset.sample_id(other)}"

        self.add_samples("heldout_in_training", shared, detail)


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
    """(n,) tokens of every text, as training counts them. Phones are counted once and stored beside the indexes."""
    if language := language_of(limits.text_unit):
        units = count_text_tokens(dataset, Phonemizer(language))
    else:
        units = dataset.text_chars if limits.text_unit == "chars" else dataset.text_bytes
    return units.astype(np.int64) + EXTRA_TEXT_TOKENS


def characters_per_second(dataset: Dataset, frames_per_second: float) -> np.ndarray:
    """(n,) characters of the text per second of latents."""
    return dataset.text_chars * frames_per_second / np.maximum(dataset.frames, 1)


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
    values: np.ndarray, valid: np.ndarray, sigmas: float, min_ratio: float
) -> tuple[np.ndarray, float, float]:
    """(distance (n,), limit, median): an outlier's logarithm is farther from the median than limit.

    The limit is `sigmas` robust standard deviations (1.4826 times the median absolute deviation) of
    the logarithm, and at least log(`min_ratio`). Where not `valid` (positive values) the distance is 0.
    """
    distance = np.zeros(len(values))
    if not valid.any():
        return distance, np.inf, np.nan
    logs = np.log(np.maximum(values[valid].astype(np.float64), 1e-30))
    centre = float(np.median(logs))
    distance[valid] = np.abs(logs - centre)
    spread = 1.4826 * float(np.median(distance[valid]))
    return distance, max(sigmas * spread, float(np.log(min_ratio))), float(np.exp(centre))


def repeats(hashes: np.ndarray, samples: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """((k,) samples that have the hash of an earlier one, (n,) the first sample with each hash).

    `samples` (m,) are the ones compared, ascending; None: all.
    """
    samples = np.arange(len(hashes)) if samples is None else samples
    first = np.arange(len(hashes))
    _, start, group = np.unique(hashes[samples], return_index=True, return_inverse=True)
    first[samples] = samples[start[group]]
    return samples[first[samples] != samples], first
