"""Figures of every row of the table, what the systems differ by, and evaluation.json.

A row is the recordings, the codec (recordings encoded and decoded) or a system. Its scores are (seeds,
utterances); recordings and codec have one seed.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from titan_tts.evaluate.prompts import Prompt
from torchtitan.models.dit_tts.speech.scoring.scores import UtteranceScore
from torchtitan.models.dit_tts.speech.scoring.statistics import (
    Interval,
    difference,
    mean_interval,
    rate_interval,
)

FIGURES = {
    "wer": "WER",
    "cer": "CER",
    "speaker_similarity": "speaker similarity",
    "opinion": "opinion",
    "duration_error": "duration error",
}
"""Figure -> the head of its column"""

RATES = {"wer": "word", "cer": "character"}
HIGHER_IS_BETTER = ("speaker_similarity", "opinion")
MAX_WER_OF_RECORDINGS = 0.2
"""Above it, the recognizer is taken to be unfit for the texts or the language."""

RECORDINGS, CODEC, SYSTEM, UNTRAINED = "recordings", "codec", "system", "untrained"


@dataclass
class Row:
    """One row of the table."""

    name: str
    kind: str
    """RECORDINGS, CODEC, SYSTEM or UNTRAINED"""

    seeds: list[int | None]
    """of the noise; None where there is none"""

    scores: list[list[UtteranceScore]]
    """(seeds, utterances)"""

    details: dict[str, Any] = field(default_factory=dict)
    """of a system: run, step, weights, sampling, seconds, real_time_factor"""

    @property
    def is_speech_of_a_model(self) -> bool:
        return self.kind in (SYSTEM, UNTRAINED)


def _terms(
    row: Row, figure: str, prompts: Sequence[Prompt], fps: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """(seeds, utterances) of errors and their counts, or of values (NaN where missing) and None."""
    if figure in RATES:
        unit = RATES[figure]
        both = [
            [(s.errors and asdict(s.errors)) or defaultdict(lambda: math.nan) for s in seed]
            for seed in row.scores
        ]
        errors = np.array([[one[f"{unit}_errors"] for one in seed] for seed in both], float)
        return errors, np.array([[one[f"{unit}s"] for one in seed] for seed in both], float)
    if figure == "duration_error":
        values = [
            [duration_error(s, p, fps) for s, p in zip(seed, prompts, strict=True)]
            for seed in row.scores
        ]
        found = np.abs(np.array(values, float))
        return (found if row.is_speech_of_a_model else found * math.nan), None
    return np.array([[getattr(s, figure) for s in seed] for seed in row.scores], float), None


def duration_error(score: UtteranceScore, prompt: Prompt, fps: float) -> float | None:
    """Seconds of the sound over those of the recording as it is encoded, less one; None without one."""
    return score.seconds * fps / len(prompt.latents) - 1 if prompt.latents is not None else None


def figures_of(row: Row, prompts: Sequence[Prompt], fps: float) -> dict[str, dict | None]:
    """{figure: {"value", "low", "high"}}; None where no utterance has it.

    Args:
        fps: latent frames per second.
    """
    found: dict[str, dict | None] = {}
    for figure in FIGURES:
        values, counts = _terms(row, figure, prompts, fps)
        if np.isnan(values).all():
            found[figure] = None
        else:
            interval = mean_interval(values) if counts is None else rate_interval(values, counts)
            found[figure] = _plain(interval)
    return found


def _plain(interval: Interval) -> dict[str, float | None]:
    """For JSON, which has no NaN."""
    values = {name: getattr(interval, name) for name in ("value", "low", "high")}
    return {name: float(v) if math.isfinite(v) else None for name, v in values.items()}


def differences(rows: Sequence[Row], prompts: Sequence[Prompt], fps: float) -> list[dict[str, Any]]:
    """What each system's figures are above those of each later one, with intervals; better is the name
    of a system, or None: a tie."""
    found = []
    systems = [row for row in rows if row.kind == SYSTEM]
    for first, second in combinations(systems, 2):
        for figure in FIGURES:
            values, counts = _terms(first, figure, prompts, fps)
            others, _ = _terms(second, figure, prompts, fps)
            if np.isnan(values).all() or np.isnan(others).all():
                continue
            interval = difference(values, others, None if counts is None else counts[0])
            first_is_better = (interval.value > 0) == (figure in HIGHER_IS_BETTER)
            better = first.name if first_is_better else second.name
            found.append(
                {
                    "first": first.name,
                    "second": second.name,
                    "figure": figure,
                    **_plain(interval),
                    "better": None if interval.is_tie else better,
                }
            )
    return found


def rates_by_speaker(row: Row, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Word error rate of each speaker, over all seeds; those with words only."""
    errors: dict[str, int] = defaultdict(int)
    words: dict[str, int] = defaultdict(int)
    for seed in row.scores:
        for prompt, score in zip(prompts, seed, strict=True):
            if score.errors is not None:
                errors[prompt.speaker] += score.errors.word_errors
                words[prompt.speaker] += score.errors.words
    return {s: errors[s] / words[s] for s in sorted(words) if words[s]}


def worst_first(rows: Sequence[Row], count: int) -> list[int]:
    """Places of the utterances, those in which the systems have the highest word error rate first; then
    by character error rate, similarity and opinion."""

    def badness(place: int) -> tuple[float, ...]:
        scores = [seed[place] for row in rows if row.kind == SYSTEM for seed in row.scores]
        errors = [score.errors for score in scores if score.errors is not None]
        words = sum(e.word_errors for e in errors) / max(1, sum(e.words for e in errors))
        letters = sum(e.character_errors for e in errors) / max(
            1, sum(e.characters for e in errors)
        )
        voices = [s.speaker_similarity for s in scores if s.speaker_similarity is not None]
        opinions = [score.opinion for score in scores if score.opinion is not None]
        return words, letters, -float(np.mean(voices or 0)), -float(np.mean(opinions or 0))

    return sorted(range(count), key=lambda place: [-value for value in badness(place)])


def unfit(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence where the recognizer errs so often in real speech that its figures say little."""
    for row in rows:
        wer = row["figures"]["wer"]
        rate = (wer and wer["value"]) or 0.0
        if row["kind"] in (RECORDINGS, CODEC) and rate > MAX_WER_OF_RECORDINGS:
            return (
                f"the recognizer's WER is {100 * rate:.1f} % on the {row['name']}, so word errors of the "
                "systems say little: it does not know this language or speech, or the texts are not those "
                "of the audio"
            )
        if row["kind"] == RECORDINGS:  # these are enough; the codec may be bad
            break
    return ""


def build(rows: Sequence[Row], prompts: Sequence[Prompt], fps: float, about: dict) -> dict:
    """The content of evaluation.json.

    Args:
        about: what was evaluated with what: test set, scorers, options.
    """
    table = [
        {
            "name": row.name,
            "kind": row.kind,
            "seeds": row.seeds,
            "figures": figures_of(row, prompts, fps),
            "wer_by_speaker": rates_by_speaker(row, prompts),
            **row.details,
        }
        for row in rows
    ]
    return {
        **about,
        "rows": table,
        "differences": differences(rows, prompts, fps),
        "unfit_recognizer": unfit(table),
        "utterances": [
            {
                "key": prompt.key,
                "file": prompt.file_name,
                "text": prompt.text,
                "speaker": prompt.speaker,
                "language": prompt.language,
                "recording_seconds": None if prompt.latents is None else len(prompt.latents) / fps,
                "has_reference": prompt.reference is not None,
                "scores": {
                    row.name: [_score(seed[place], prompt, fps) for seed in row.scores]
                    for row in rows
                },
            }
            for place, prompt in enumerate(prompts)
        ],
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


# The tables, as the terminal and the page have them.


def number(figure: str, value: float | None, signed: bool = False) -> str:
    """A figure as people read it; a dash for None."""
    if value is None:
        return "-"
    sign = "+" if signed else ""
    if figure in ("wer", "cer", "duration_error"):
        return f"{100 * value:{sign}.1f} %"
    return f"{value:{sign}.3f}" if figure == "speaker_similarity" else f"{value:{sign}.2f}"


def limits(figure: str, row: dict[str, Any] | None, signed: bool = False) -> str:
    """The interval of a figure, or nothing where there is none."""
    if row is None or row["low"] is None:
        return ""
    low, high = (number(figure, row[name], signed) for name in ("low", "high"))
    return f"{low.removesuffix(' %')} to {high}"


def shown_figures(report: dict[str, Any]) -> list[str]:
    """The figures that any row has."""
    return [f for f in FIGURES if any(row["figures"][f] is not None for row in report["rows"])]


def text_tables(report: dict[str, Any]) -> str:
    """The tables for a terminal."""
    figures = shown_figures(report)
    table = [["", *(FIGURES[figure] for figure in figures), "real-time factor"]]
    for row in report["rows"]:
        cells = [row["name"]]
        for figure in figures:
            found = row["figures"][figure]
            interval = limits(figure, found)
            value = number(figure, found and found["value"])
            cells.append(f"{value} ({interval})" if interval else value)
        table.append([*cells, number("", row.get("real_time_factor"))])
    lines = _aligned(table)
    speakers = sorted({s for row in report["rows"] for s in row["wer_by_speaker"]})
    if 1 < len(speakers) <= 8:
        by_speaker = [["WER by speaker", *speakers]]
        for row in report["rows"]:
            rates = row["wer_by_speaker"]
            by_speaker.append([row["name"], *(number("wer", rates.get(s)) for s in speakers)])
        lines += ["", *_aligned(by_speaker)]
    if report["differences"]:
        rows = [["difference", "figure", "", "95 % interval", ""]]
        for each in report["differences"]:
            figure = each["figure"]
            verdict = f"{each['better']} is better" if each["better"] else "tie"
            value, interval = number(figure, each["value"], True), limits(figure, each, True)
            pair = f"{each['first']} - {each['second']}"
            rows.append([pair, FIGURES[figure], value, interval, verdict])
        lines += ["", *_aligned(rows)]
    return "\n".join(lines)


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
