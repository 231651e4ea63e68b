"""evaluation.html: the tables, and the worst utterances to hear and see, in one file without network; and the page of a
fine-tune: base and result side by side, on the new recordings and on what the base knew."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.evaluate.evaluate import Evaluation, wav_path
from titan_tts.evaluate.prompts import RECORDINGS, REFERENCE, Prompt, read_sound
from titan_tts.evaluate.report import (
    FIGURES,
    SPEED,
    SYSTEM,
    shown_figures,
    warnings,
    worst_first,
    wrong_words,
)
from titan_tts.report.page import Audio, Cell, Note, Page, Part, Section, Table
from titan_tts.report.sound import with_spectrograms
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.speech.scoring.interface import Sound as Waveform

_MEANING = (
    "Small figures: 95 % intervals, for other texts in these voices and other noise. No system can be expected to be better "
    "than the codec's row, nor the codec than the recordings. WER and CER: errors per word and character of all texts, both "
    "sides normalized. Duration error: mean difference of the lengths of speech and recording. F0: near that of the recordings "
    "is good. Real-time factor: seconds to make a second of speech."
)
_HEARD = 8
"""texts of each set"""

_ANOTHER_TEXT = 0.5
"""errors per word of a recording above which its text may be another's"""


def evaluation_page(report: dict[str, Any], utterances: Sequence[Audio] = ()) -> Page:
    """The page, of what `report.build` and `shown_utterances` return."""
    systems = [row for row in report["rows"] if row["kind"] == SYSTEM]
    test, total = report["test"], len(report["utterances"])
    seeds = f", {counted(len(systems[0]['seeds']), 'noise seed')} each" if systems else ""
    parts: list[Part] = [
        Section("Figures", [figures_table(report), Note(_MEANING), *differences_table(report)]),
        Section("Measured with", [Table((), [*_measured_with(report, systems)], left=(0, 1))]),
    ]
    if utterances:
        shown = f"{len(utterances)} of {total}"
        if more := total - len(utterances):
            shown += f"; {more:,} more in wavs/ and evaluation.json"
        legend = (
            f"{shown}. Audio is FLAC, as it was scored. Of the seeds, the one with most word errors. A click on a spectrogram "
            "(80 mel bands, one scale per utterance) plays from there. Words are marked as they are compared: another word was "
            "expected, +one that was not, or struck out: it was not heard."
        )
        parts.append(Section("Utterances, the worst first", [Note(legend), *utterances], False))
    return Page(
        f"Evaluation of {', '.join(row['name'] for row in systems or report['rows'])}",
        parts,
        about=f"{counted(test['utterances'], 'utterance')} of {test['source']}{seeds}",
        warnings=warnings(report),
        data=report,
        generator="titan-tts evaluate",
    )


def figures_table(report: dict[str, Any]) -> Table:
    figures = shown_figures(report)
    rows = []
    for row in report["rows"]:
        cells: list[str | Cell] = [row["name"]]
        for name, figure in figures.items():
            found = row["figures"][name]
            cells.append(Cell(figure.text(found and found["value"]), figure.limits(found)))
        rows.append([*cells, SPEED.text(row.get("real_time_factor"))])
    heads = (figure.head for figure in figures.values())
    return Table(("", *heads, SPEED.head), rows, on_terminal=1000)


def differences_table(report: dict[str, Any]) -> Iterator[Part]:
    rows: list[Sequence[str | Cell]] = []
    for each in report["differences"]:
        figure, better = FIGURES[each["figure"]], each["better"]
        pair = f"{each['first']} - {each['second']}"
        value, limits = figure.text(each["value"], True), figure.limits(each, True)
        verdict = Cell(f"{better} is better", badge="good") if better else Cell("tie", badge="note")
        rows.append((pair, figure.head, value, limits, verdict))
    if rows:
        head = ("systems", "figure", "difference", "95 % interval", "verdict")
        yield Table(head, rows, title="Differences", left=(0, 1, 4), on_terminal=1000)
        yield Note(
            "Utterance by utterance; of rates in percentage points. Tie: the interval holds 0, so this test does not tell which "
            "system is better. About one in twenty comparisons of equal systems is not called a tie."
        )


def _measured_with(
    report: dict[str, Any], systems: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    scorers = report["scorers"]
    yield "words", scorers["recognizer"]
    yield "voice", scorers["speaker"] or "not measured (--speaker-scorer)"
    yield "opinion", scorers["opinion"] or "not measured (--opinion)"
    if unknown := ", ".join(report["test"]["unknown_training_data"]):
        yield (
            "training data",
            f"what {unknown} learned from is not known here: it may be these utterances",
        )
    if scorers.get("pitch"):
        yield "F0", scorers["pitch"]
    for row in systems:
        how, weights = row["sampling"], f", weights {row['weights']}" if row["weights"] else ""
        yield (
            row["name"],
            f"{row['run']} step {row['step']}{weights}; {counted(how['steps'], 'sampling step')} ({how['solver']}, "
            f"{how['schedule']}), {how['guidance']} guidance, text scale {how['text_scale']}, speaker scale "
            f"{how['speaker_scale']}",
        )


def shown_utterances(report: dict[str, Any], evaluation: Evaluation, count: int) -> list[Audio]:
    """The `count` worst utterances, each with the noise seed that has most word errors over all systems."""
    systems = [row for row in report["rows"] if row["kind"] == SYSTEM]
    shown = []
    for index in worst_first(evaluation.scored, len(report["utterances"]))[:count]:
        row, prompt = report["utterances"][index], evaluation.tests.prompts[index]
        seeds = systems[0]["seeds"] if systems else [None]
        errors = [
            sum(row["scores"][system["name"]][seed]["word_errors"] for system in systems)
            for seed in range(len(seeds))
        ]
        seed = int(np.argmax(errors))
        sounds = []
        for sound in with_spectrograms([*_sounds(prompt, evaluation, systems, seed)]):
            if scores := row["scores"].get(sound.label):
                score = scores[seed if len(scores) > 1 else 0]
                sound = replace(sound, words=marks(score["compared"]), **_verdict(score))
            sounds.append(sound)
        speaker = f", speaker {row['speaker']}" if row["speaker"] else ""
        of_seed = f", seed {seeds[seed]}" if systems else ""
        note = f"{row['key']}{speaker}{of_seed}"
        shown.append(Audio(row["text"], note, sounds))
    return shown


def _verdict(score: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on one sound: its word errors and other scores."""
    found: dict[str, Any] = {}
    if "words" in score:
        errors = counted(score["word_errors"], "error")
        found["verdict"] = f"{errors} in {counted(score['words'], 'word')}"
        found["verdict_kind"] = "error" if score["word_errors"] else "good"
    figures = {"speaker_similarity": "similarity {}", "pitch": "F0 {} Hz", "opinion": "opinion {}"}
    notes = [
        words.format(FIGURES[name].text(score[name]))
        for name, words in figures.items()
        if score[name] is not None
    ]
    nothing = [] if score["heard"] else ["(nothing heard)"]
    return found | {"note": " ".join([*nothing, *notes])}


def _sounds(
    prompt: Prompt, evaluation: Evaluation, systems: Sequence[dict[str, Any]], seed: int
) -> Iterator[tuple[str, Waveform]]:
    """(name, sound) of every sound of an utterance. All but the reference have the name of their row."""
    shown = {REFERENCE, *(row.name for row in evaluation.scored)}
    for name, load in prompt.loads(evaluation.codec).items():
        if name in shown:
            yield name, load()
    for system in systems:
        path = evaluation.wav(system["name"], system["seeds"][seed], prompt)
        yield system["name"], read_sound(path)


def marks(compared: Sequence[str]) -> list[tuple[str, str, str]]:
    """(word, kind, expected word) of a text and what was heard, as they were compared; the kind is right, wrong (another
    word was expected), extra, or missing (it was not heard)."""
    import jiwer

    wanted, found = (each.split() for each in compared)
    if not wanted:
        return [(word, "extra", "") for word in found]
    out: list[tuple[str, str, str]] = []
    for chunk in jiwer.process_words(" ".join(wanted), " ".join(found)).alignments[0]:
        lost = wanted[chunk.ref_start_idx : chunk.ref_end_idx]
        said = found[chunk.hyp_start_idx : chunk.hyp_end_idx]
        if chunk.type == "equal":
            out += [(word, "right", "") for word in said]
        elif chunk.type == "substitute":
            out += [(word, "wrong", instead) for word, instead in zip(said, lost, strict=True)]
        elif chunk.type == "insert":
            out += [(word, "extra", "") for word in said]
        else:
            out += [(word, "missing", "") for word in lost]
    return out


def comparison_page(title: str, evaluations: Mapping[str, Path]) -> Page:
    """`evaluations`: heading -> folder of an evaluation."""
    sections, careful = [], list[str]()
    for heading, folder in evaluations.items():
        found = read_json(folder / "evaluation.json", test=dict, rows=list, utterances=list)
        careful += warnings(found)
        tables = [figures_table(found), *differences_table(found)]
        sections.append(Section(heading, [*tables, *_heard(folder, found)]))
    return Page(
        title,
        sections,
        about="The base and what became of it.",
        warnings=[*dict.fromkeys(careful)],
        generator="titan-tts finetune",
    )


def _heard(folder: Path, found: Mapping[str, Any]) -> Iterator[Part]:
    """The texts with most errors of both; before them those whose recordings differ from them in most words."""
    systems = [row for row in found["rows"] if row["kind"] == SYSTEM]
    names, seed = [row["name"] for row in systems], systems[0]["seeds"][0]

    def errors(utterance: dict[str, Any]) -> tuple[bool, int]:
        of_both = sum(utterance["scores"][name][0].get("word_errors", 0) for name in names)
        return wrong_words(utterance, RECORDINGS) > _ANOTHER_TEXT, of_both

    worst = sorted(found["utterances"], key=errors, reverse=True)[:_HEARD]
    yield Note(
        f"{len(worst)} of {len(found['utterances'])} texts, those with most word errors first, before them those whose recordings "
        f"have other words; all are in {folder / 'evaluation.html'} and wavs/ next to it."
    )
    for utterance in worst:
        paths = ((name, wav_path(folder, names, name, seed, utterance["file"])) for name in names)
        sounds, scores = [(name, read_sound(path)) for name, path in paths], utterance["scores"]
        shown = []
        for sound in with_spectrograms(sounds):
            score = scores[sound.label][0]
            shown.append(replace(sound, words=marks(score["compared"]), **_verdict(score)))
        of_recording = [
            f'heard in the recording: "{each["heard"]}"' for each in scores.get(RECORDINGS, [])
        ]
        yield Audio(utterance["text"], ", ".join([utterance["key"], *of_recording]), shown)
