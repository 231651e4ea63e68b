"""The kinds of faults that the doctor knows, and what it says about them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        code: its stable name in the JSON.
        severity: "error" (damaged data), "warning" (sound, yet likely to harm a training) or
            "note" (worth knowing).
        title: what the samples or shards counted are.
        advice: what to do.
    """

    code: str
    severity: str
    title: str
    advice: str


KINDS: dict[str, Kind] = {
    code: Kind(code, severity, title, advice)
    for code, severity, title, advice in (
        (
            "damaged_shard",
            "error",
            "Shards that are damaged or cut off",
            "Copy or write the shard again; the samples behind the damage are lost to training.",
        ),
        (
            "incomplete_sample",
            "error",
            "Samples that lack one of their three members",
            'Complete or remove them; [data] on_error = "skip" trains on the others.',
        ),
        (
            "not_finite",
            "error",
            "Samples with NaN or infinite values",
            "One of them makes the loss NaN: encode these utterances again or remove them.",
        ),
        (
            "unusable_sample",
            "error",
            "Samples that cannot be parsed or do not fit the others",
            'Write them again or remove them; [data] on_error = "skip" trains on the others.',
        ),
        (
            "damaged_sample",
            "error",
            "Samples whose bytes are not those that were written",
            "They were damaged on a disk or on the way: copy the shard again from a sound place.",
        ),
        (
            "shard_missing",
            "error",
            "Shards that prepare.json lists and that are not there",
            "Copy them, or prepare the dataset again.",
        ),
        (
            "shard_changed",
            "error",
            "Shards that differ from what prepare.json recorded",
            "Copy them again; if they were changed on purpose, remove prepare.json.",
        ),
        (
            "zero_latents",
            "error",
            "Latents that are all zero",
            "Nothing was encoded: encode these utterances again or remove them.",
        ),
        (
            "constant_latents",
            "error",
            "Latents that never change",
            "Every frame is the same, which no speech is: encode again or remove them.",
        ),
        (
            "constant_reference",
            "error",
            "References that are all zero or never change",
            "They say nothing about the speaker: encode again or remove the samples.",
        ),
        (
            "std_outlier",
            "warning",
            "Latents with a standard deviation far from the others'",
            "Often another loudness, another codec or silence: listen to a few.",
        ),
        (
            "peak_outlier",
            "warning",
            "Latents with a largest value far above the others'",
            "Often a damaged or clipped recording: listen to a few.",
        ),
        (
            "constant_channel",
            "warning",
            "Channels that are the same in every frame",
            "The codec does not use them, or they were lost on the way.",
        ),
        (
            "chars_per_second_outlier",
            "warning",
            "Speech much faster or slower than the rest",
            "Text and audio probably do not belong together, or one of them is cut.",
        ),
        (
            "empty_text",
            "warning",
            "Samples without text",
            "The model learns to speak from nothing: give them their text or remove them.",
        ),
        (
            "long_text",
            "warning",
            "Texts over the limit of tokens",
            "Training drops them ([data] on_too_long): raise max_text_tokens or split them.",
        ),
        (
            "long_latents",
            "warning",
            "Latents over the limit of frames",
            "Training drops or crops them ([data] on_too_long): raise max_frames or split them.",
        ),
        (
            "duration_mismatch",
            "warning",
            "Latents whose length is not their target_duration",
            "Audio was cut or padded, or the frame rate is another: see frames_per_second.",
        ),
        (
            "bad_duration",
            "warning",
            "Samples whose target_duration is no positive number",
            "Write the duration in seconds.",
        ),
        (
            "duplicate_latents",
            "warning",
            "Samples with the latents of an earlier sample",
            "The same recording counts several times: remove the copies.",
        ),
        (
            "duplicate_keys",
            "warning",
            "Samples with the key of a sample in another shard",
            "Harmless where two corpora number alike; else a shard was packed twice.",
        ),
        (
            "reference_from_target",
            "warning",
            "References that are cut from their own target",
            "The model can copy what it should say: take another utterance of the speaker.",
        ),
        (
            "duplicate_text",
            "note",
            "Samples with speaker and text of an earlier sample",
            "Several takes of one sentence, or copies that were encoded apart.",
        ),
        (
            "single_utterance_speaker",
            "note",
            "Speakers with one utterance",
            "No other utterance can be their reference.",
        ),
        (
            "no_speaker",
            "note",
            "Samples without a speaker",
            "They cannot be balanced by speaker nor tagged with one.",
        ),
        (
            "no_duration",
            "note",
            "Samples without target_duration",
            "Their length was not compared with anything.",
        ),
        (
            "no_reference",
            "note",
            "Samples whose reference is empty",
            "They train the model without a speaker.",
        ),
    )
}


@dataclass(frozen=True)
class Example:
    """One sample or shard, by its id, and in words what is the matter with it."""

    where: str
    detail: str


@dataclass(frozen=True)
class Finding:
    """``count`` cases of a kind, with the first or the worst of them."""

    kind: Kind
    count: int
    examples: tuple[Example, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: code, severity, title, advice, count, examples."""
        return {
            **asdict(self.kind),
            "count": self.count,
            "examples": [asdict(example) for example in self.examples],
        }


def finding_of(
    code: str,
    cases: np.ndarray,
    example: Callable[[int], Example],
    max_examples: int,
    *,
    score: np.ndarray | None = None,
) -> list[Finding]:
    """One finding, or none where there is no case.

    Args:
        cases: (k,) numbers of the samples (or other things) it is about.
        example: number -> its example.
        score: (k,) how bad each is, to show the worst first; None: in the given order.
    """
    if not len(cases):
        return []
    order = np.arange(len(cases)) if score is None else np.argsort(-score, kind="stable")
    shown = cases[order[:max_examples]]
    return [Finding(KINDS[code], len(cases), tuple(example(int(case)) for case in shown))]


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; within each in the order of ``KINDS``."""
    place = {code: number for number, code in enumerate(KINDS)}
    return sorted(
        findings, key=lambda one: (SEVERITIES.index(one.kind.severity), place[one.kind.code])
    )
