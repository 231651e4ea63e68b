"""Figures of every row of the table, differences between the systems, and evaluation.json.

A row is the recordings, the codec (recordings encoded and decoded) or a system. Its scores are (seeds,
utterances); recordings and codec have one seed.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, product
from typing import Any

import numpy as np

from titan_tts.evaluate.prompts import CODEC, RECORDINGS, Prompt
from torchtitan.models.dit_tts.speech.scoring.scores import UtteranceScore, corpus_scores
from torchtitan.models.dit_tts.speech.scoring.statistics import (
    Interval,
    difference,
    mean_interval,
    rate_interval,
)

MAX_WER_OF_RECORDINGS = 0.2
"""Above it, the recognizer is taken to be unfit for the texts or the language."""

SYSTEM = "system"


@dataclass
class Row:
    """One row of the table."""

    name: str
    kind: str
    """RECORDINGS, CODEC or SYSTEM"""

    seeds: list[int | None]
    """of the noise; None where there is none"""

    scores: list[list[UtteranceScore]]
    """(seeds, utterances)"""

    details: dict[str, Any] = field(default_factory=dict)
    """of a system: run, step, weights, sampling, seconds, real_time_factor"""


@dataclass(frozen=True)
class Figure:
    """One figure of the rows, and how it is printed."""

    head: str
    """of its column"""

    digits: int = 2
    percent: bool = False
    errors_per: str = ""
    """word or character: errors over the counts of all texts; empty: a mean over the utterances"""

    higher_is_better: bool | None = False
    """None: it describes, and no system is better by it"""

    def text(self, value: float | None, signed: bool = False) -> str:
        """The value as people read it, without the sign of a zero; a dash for None."""
        if value is None:
            return "-"
        number, digits = (100 * value, 1) if self.percent else (value, self.digits)
        text = f"{number:{'+' if signed else ''}.{digits}f}"
        return (text if float(text) else text.lstrip("+-")) + (" %" if self.percent else "")

    def limits(self, interval: dict[str, Any] | None, signed: bool = False) -> str:
        """The limits of an interval; empty where there are none, or where they read alike."""
        if interval is None or interval["low"] is None:
            return ""
        low, high = (self.text(interval[name], signed) for name in ("low", "high"))
        return f"{low.removesuffix(' %')} to {high}" if low != high else ""


FIGURES = {
    "wer": Figure("WER", percent=True, errors_per="word"),
    "cer": Figure("CER", percent=True, errors_per="character"),
    "speaker_similarity": Figure("speaker similarity", digits=3, higher_is_better=True),
    "opinion": Figure("opinion", higher_is_better=True),
    "duration_error": Figure("duration error", percent=True),
    "pitch": Figure("F0 (Hz)", digits=0, higher_is_better=None),
    "pitch_range": Figure("F0 range (semitones)", digits=1, higher_is_better=None),
}
SPEED = Figure("real-time factor")


def _terms(
    row: Row, name: str, prompts: Sequence[Prompt], fps: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """(seeds, utterances) of errors and their counts, or of values (NaN where missing) and None."""

    def table(value: Callable[[UtteranceScore, Prompt], float | None]) -> np.ndarray:
        pairs = [zip(seed, prompts, strict=True) for seed in row.scores]
        return np.array([[value(score, prompt) for score, prompt in seed] for seed in pairs], float)

    if unit := FIGURES[name].errors_per:
        errors = table(lambda score, _: getattr(score.errors, f"{unit}_errors", math.nan))
        return errors, table(lambda score, _: getattr(score.errors, f"{unit}s", math.nan))
    if name == "duration_error":
        values = np.abs(table(lambda score, prompt: duration_error(score, prompt, fps)))
        return values * (1 if row.kind == SYSTEM else math.nan), None
    return table(lambda score, _: getattr(score, name)), None


def duration_error(score: UtteranceScore, prompt: Prompt, fps: float) -> float | None:
    """Length of the sound over that of the encoded recording, minus 1; None without a recording."""
    return score.seconds * fps / len(prompt.latents) - 1 if prompt.latents is not None else None


def figures_of(row: Row, prompts: Sequence[Prompt], fps: float) -> dict[str, dict | None]:
    """{figure: {"value", "low", "high"}}; None where no utterance has it. `fps`: latent frames per
    second.
    """
    figures: dict[str, dict | None] = {}
    for name in FIGURES:
        values, counts = _terms(row, name, prompts, fps)
        if np.isnan(values).all():
            figures[name] = None
        else:
            interval = mean_interval(values) if counts is None else rate_interval(values, counts)
            figures[name] = _plain(interval)
    return figures


def _plain(interval: Interval) -> dict[str, float | None]:
    """Return an interval for JSON, which has no NaN."""
    values = {name: getattr(interval, name) for name in ("value", "low", "high")}
    return {name: float(v) if math.isfinite(v) else None for name, v in values.items()}


def differences(
    rows: Sequence[Row], prompts: Sequence[Prompt], fps: float, void: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Each system's figures minus each later one's, with intervals, without those that are `void`; better is the name of
    a system, or None for a tie."""
    found = []
    systems = [row for row in rows if row.kind == SYSTEM]
    for first, second in combinations(systems, 2):
        for name, figure in FIGURES.items():
            if figure.higher_is_better is None or name in void:
                continue
            values, counts = _terms(first, name, prompts, fps)
            others, _ = _terms(second, name, prompts, fps)
            if np.isnan(values).all() or np.isnan(others).all():
                continue
            interval = difference(values, others, None if counts is None else counts[0])
            first_is_better = (interval.value > 0) == figure.higher_is_better
            better = first.name if first_is_better else second.name
            found.append(
                {
                    "first": first.name,
                    "second": second.name,
                    "figure": name,
                    **_plain(interval),
                    "better": None if interval.is_tie else better,
                }
            )
    return found


def worst_first(rows: Sequence[Row], count: int) -> list[int]:
    """Indices of the utterances, sorted by the systems' (without any: by all rows') word error rate, then character
    error rate."""
    judged = [row for row in rows if row.kind == SYSTEM] or rows

    def errors(index: int) -> list[float]:
        found = corpus_scores([seed[index] for row in judged for seed in row.scores])
        return [found["wer"] or 0.0, found["cer"] or 0.0]

    return sorted(range(count), key=errors, reverse=True)


def unfit(rows: Sequence[dict[str, Any]], utterances: Sequence[dict[str, Any]] = ()) -> str:
    """A warning where the recognizer errs so often in real speech that its figures say little; it names the three worst
    of the utterances."""
    for row in rows:
        wer = row["figures"]["wer"]
        rate = (wer and wer["value"]) or 0.0
        if row["kind"] in (RECORDINGS, CODEC) and rate > MAX_WER_OF_RECORDINGS:
            wrong = {u["key"]: wrong_words(u, row["name"]) for u in utterances}
            named = [key for key in sorted(wrong, key=lambda key: -wrong[key])[:3] if wrong[key]]
            return (
                f"the recognizer's WER is {100 * rate:.1f} % on the {row['name']}, so word errors of the "
                "systems say little: it does not know this language or speech, or the texts are not those "
                f"of the audio{', worst in ' if named else ''}{', '.join(named)}"
            )
        if row["kind"] == RECORDINGS:  # these are enough; the codec may be bad
            break
    return ""


def wrong_words(utterance: dict[str, Any], row: str) -> float:
    """Errors per word of the row's sound of an utterance with its first seed; 0 where it was not scored."""
    [score, *_] = utterance["scores"].get(row) or [{}]
    return score.get("word_errors", 0) / max(1, score.get("words", 0))


def void_figures(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """{"speaker_similarity": sentence} where a system has more of it than the recordings, or the codec's copies of them,
    have: a scorer that finds it more like the speaker than the speaker does not know the voice."""
    name, figure = "speaker_similarity", FIGURES["speaker_similarity"]
    known = [(row, row["figures"][name]["value"]) for row in rows if row["figures"][name]]
    for (system, high), (copy, low) in product(known, known):
        if system["kind"] == SYSTEM != copy["kind"] and high > low:
            return {
                name: f"the scorer of voices puts {system['name']} ({figure.text(high)}) above the {copy['name']} "
                f"({figure.text(low)}), so it does not know this voice and compares no system; give another "
                "--speaker-scorer, and listen"
            }
    return {}


def warnings(report: dict[str, Any]) -> list[str]:
    """Sentences about what the figures do not say."""
    test = report["test"]
    left_out = ", ".join(f"{count} {reason}" for reason, count in test["left_out"].items())
    voiceless, missing = test["without_reference"], test["without_recording"]
    found = (
        left_out and f"utterances left out: {left_out}",
        voiceless and f"{voiceless} utterances have no reference, so their voice is arbitrary",
        0 < missing < test["utterances"]
        and f"{missing} utterances have no recording, so there is no row of the recordings",
        test["is_training_data"]
        and "a system was trained on these utterances, so its figures praise memory",
        report["unfit_recognizer"],
        *report["void"].values(),
    )
    return [sentence for sentence in found if sentence]


def build(rows: Sequence[Row], prompts: Sequence[Prompt], fps: float, about: dict) -> dict:
    """The content of evaluation.json. `about`: test set, scorers and options."""
    table = [
        {
            "name": row.name,
            "kind": row.kind,
            "seeds": row.seeds,
            "figures": figures_of(row, prompts, fps),
            **row.details,
        }
        for row in rows
    ]
    void = void_figures(table)
    utterances = [
        {
            "key": prompt.id,
            "file": prompt.file_name,
            "text": prompt.text,
            "speaker": prompt.speaker,
            "language": prompt.language,
            "recording_seconds": None if prompt.latents is None else len(prompt.latents) / fps,
            "has_reference": prompt.voice is not None,
            "scores": {
                row.name: [_score(seed[index], prompt, fps) for seed in row.scores] for row in rows
            },
        }
        for index, prompt in enumerate(prompts)
    ]
    return {
        **about,
        "rows": table,
        "differences": differences(rows, prompts, fps, void),
        "void": void,
        "unfit_recognizer": unfit(table, utterances),
        "utterances": utterances,
    }


def _score(score: UtteranceScore, prompt: Prompt, fps: float) -> dict[str, Any]:
    found = asdict(score)
    found |= found.pop("errors") or {}
    found["duration_error"] = duration_error(score, prompt, fps)
    # JSON has no NaN, which a scorer may give for silence.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.items()
    }


def shown_figures(report: dict[str, Any]) -> dict[str, Figure]:
    """The figures that any row has."""
    return {
        name: figure
        for name, figure in FIGURES.items()
        if any(row["figures"][name] is not None for row in report["rows"])
    }
