"""The page of a fine-tune: base and result on the new recordings and on what the base knew, to hear side by side."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_tts.evaluate.page import differences_table, figures_table
from titan_tts.evaluate.prompts import read_sound
from titan_tts.evaluate.report import SYSTEM, warnings
from titan_tts.evaluate.systems import wav_path
from titan_tts.report.page import Audio, Note, Page, Part, Section
from titan_tts.report.sound import with_spectrograms
from torchtitan.models.dit_tts.bounded import read_json

_HEARD = 8
"""texts of each set"""


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
    """The texts with most errors of both."""
    systems = [row for row in found["rows"] if row["kind"] == SYSTEM]
    names, seed = [row["name"] for row in systems], systems[0]["seeds"][0]

    def errors(utterance: dict[str, Any]) -> int:
        return sum(utterance["scores"][name][0].get("word_errors", 0) for name in names)

    worst = sorted(found["utterances"], key=errors, reverse=True)[:_HEARD]
    yield Note(
        f"{len(worst)} of {len(found['utterances'])} texts, those with most word errors first; all are in {folder / 'evaluation.html'} "
        "and wavs/ next to it."
    )
    for utterance in worst:
        paths = ((name, wav_path(folder, names, name, seed, utterance["file"])) for name in names)
        sounds = [(name, read_sound(path)) for name, path in paths]
        yield Audio(utterance["text"], utterance["key"], with_spectrograms(sounds))
