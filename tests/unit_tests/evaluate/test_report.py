"""Figures, differences and tables, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from titan_tts.evaluate import report
from titan_tts.evaluate.page import figures_table
from titan_tts.evaluate.prompts import Prompt
from titan_tts.evaluate.report import CODEC, RECORDINGS, SYSTEM, Row
from titan_tts.report.page import Page
from torchtitan.models.dit_tts.speech.scoring.scores import UtteranceScore
from torchtitan.models.dit_tts.speech.scoring.word_errors import Errors

FPS = 25.0


def prompts(*speakers: str) -> list[Prompt]:
    """Recordings of one second."""
    one_second = torch.zeros(25, 1)
    return [Prompt(f"k{n}", "t", s, {}, {}, latents=one_second) for n, s in enumerate(speakers)]


def score(errors: int, words: int, similarity=None, opinion=None, seconds=1.0) -> UtteranceScore:
    """And an F0, which decides nothing."""
    counts = Errors(errors, words, 2 * errors, 5 * words)
    return UtteranceScore("", counts, similarity, opinion, seconds, pitch=200.0, pitch_range=5.0)


def row(*seeds: list[UtteranceScore], name="a@1", kind=SYSTEM) -> Row:
    return Row(name, kind, list(range(len(seeds))), [list(seed) for seed in seeds])


def test_rates_are_of_all_words_and_all_seeds():
    seeds = [score(1, 4), score(0, 2)], [score(2, 4), score(2, 2)]
    found = report.figures_of(row(*seeds), prompts("ann", "bob"), FPS)
    assert found["wer"]["value"] == 5 / 12  # not the mean of the two utterances
    assert found["cer"]["value"] == pytest.approx(10 / 60)
    assert found["wer"]["low"] <= 5 / 12 <= found["wer"]["high"]
    assert found["speaker_similarity"] is None and found["opinion"] is None
    without_words = report.figures_of(row([score(1, 0)]), prompts("ann"), FPS)
    assert without_words["wer"] == {"value": None, "low": None, "high": None}


def test_means_leave_out_what_is_missing():
    lengths = row([score(0, 1, similarity=0.5, seconds=0.9), *[score(0, 1, seconds=1.2)] * 2])
    three = prompts("ann", "bob", "eve")
    three[2] = replace(three[2], latents=None)
    found = report.figures_of(lengths, three, FPS)
    assert found["speaker_similarity"]["value"] == 0.5
    assert found["duration_error"]["value"] == pytest.approx((0.1 + 0.2) / 2)
    codec = replace(lengths, kind=CODEC)
    assert report.figures_of(codec, three, FPS)["duration_error"] is None


def test_differences_name_the_better_system_or_a_tie():
    many = prompts(*["ann"] * 30)
    good = row([score(0, 4, 0.9, 4.0)] * 30, name="good@1")
    bad = row([score(n % 4, 4, 0.9 - 0.01 * (n % 3), 4.0) for n in range(30)], name="bad@1")
    codec = row([score(0, 4)] * 30, name="codec", kind=CODEC)
    found = report.differences([codec, bad, good], many, FPS)
    assert {(one["first"], one["second"]) for one in found} == {("bad@1", "good@1")}
    by_figure = {one["figure"]: one for one in found}
    assert by_figure["wer"]["value"] == pytest.approx(sum(n % 4 for n in range(30)) / 120)
    assert by_figure["wer"]["low"] > 0 > by_figure["speaker_similarity"]["value"]
    better = {name: one["better"] for name, one in by_figure.items()}
    assert better == dict.fromkeys(("wer", "cer", "speaker_similarity"), "good@1") | dict.fromkeys(
        ("opinion", "duration_error")
    )
    assert {one["better"] for one in report.differences([good, bad], many, FPS)} == {"good@1", None}


@pytest.mark.parametrize(
    "recordings, codec, systems, void",
    [
        (0.912, 0.895, (0.591, 0.720), ""),
        (0.9, 0.777, (0.729, 0.844), "b@1 (0.844) above the codec (0.777)"),
        (None, 0.777, (0.844, 0.729), "a@1 (0.844) above the codec (0.777)"),
        (0.7, None, (0.5, 0.71), "b@1 (0.710) above the recordings (0.700)"),
        (None, None, (0.5, 0.7), ""),  # nothing to judge the scorer by
        (0.7, 0.7, (0.7, None), ""),
    ],
)
def test_a_scorer_of_voices_needs_the_recordings_at_the_top(recordings, codec, systems, void):
    """Else its order of the systems is not told, whatever their interval; other figures are."""
    given = [("recordings", recordings, RECORDINGS), ("codec", codec, CODEC)]
    given = [each for each in given if each[1] is not None]
    given += [(name, value, SYSTEM) for name, value in zip(("a@1", "b@1"), systems, strict=True)]
    rows = [row([score(0, 4, value)] * 9, name=name, kind=kind) for name, value, kind in given]
    found = report.build(rows, prompts(*["ann"] * 9), FPS, {"test": QUIET})
    [sentence] = found["void"].values() or [""]
    assert void in sentence and bool(void) == bool(sentence)
    assert report.warnings(found) == ([sentence] if void else [])
    compared = {each["figure"] for each in found["differences"]}
    assert ("speaker_similarity" in compared) is (not void and None not in systems)
    assert "wer" in compared


QUIET = {"left_out": {}, "without_reference": 0, "without_recording": 0, "utterances": 9}
QUIET |= {"is_training_data": False}


@pytest.mark.parametrize(
    "figure, value, low, high, texts",
    [
        ("wer", 0.0, 0.0, 0.0, ("0.0 %", "")),
        ("wer", -1e-5, -2e-4, 4e-3, ("0.0 %", "0.0 to +0.4 %")),
        ("wer", -0.163, -0.485, 0.059, ("-16.3 %", "-48.5 to +5.9 %")),
        ("speaker_similarity", 0.1, None, None, ("+0.100", "")),
    ],
)
def test_a_difference_that_is_printed_says_something(figure, value, low, high, texts):
    figure, limits = report.FIGURES[figure], {"low": low, "high": high}
    assert (figure.text(value, True), figure.limits(limits, True)) == texts


def test_the_worst_utterances_come_first():
    """By the systems alone, over all seeds; words decide before characters."""
    recordings = row([score(4, 4), score(0, 4), score(0, 4), score(0, 4)], kind=RECORDINGS)
    letters = replace(score(0, 4), errors=Errors(0, 4, 9, 20))
    first = [score(0, 4), score(1, 4), letters, score(1, 4)]
    second = [score(0, 4), score(0, 4), score(0, 4), score(1, 4)]
    assert report.worst_first([recordings, row(first, second)], 4) == [3, 1, 2, 0]
    assert report.worst_first([recordings], 4) == [0, 1, 2, 3]  # without a system by all rows


def test_a_recognizer_that_errs_in_real_speech_is_named():
    for rates, words in (
        ({"codec": 0.988}, "98.8 % on the codec"),
        ({"recordings": 0.201, "codec": 0.4}, "20.1 % on the recordings"),
        ({"recordings": 0.199, "codec": 0.9}, ""),  # the codec is bad, not the recognizer
        ({"codec": None, "system": 1.0}, ""),
    ):
        rows = [
            {"name": name, "kind": name, "figures": {"wer": {"value": rate}}}
            for name, rate in rates.items()
        ]
        warning = report.unfit(rows)
        assert words in warning and bool(words) == bool(warning)
    rows = [{"name": "recordings", "kind": RECORDINGS, "figures": {"wer": {"value": 0.5}}}]
    scores = {"a": (1, 9), "b": (2, 3), "c": (0, 2), "d": (4, 4), "e": (2, 4)}
    utterances = [
        {"key": key, "scores": {"recordings": [{"word_errors": errors, "words": words}]}}
        for key, (errors, words) in scores.items()
    ]
    assert report.unfit(rows, utterances).endswith("of the audio, worst in d, b, e")
    assert report.unfit(rows, utterances[2:4]).endswith("worst in d")


def test_json_and_the_table_of_the_terminal():
    """A figure that JSON cannot hold is null."""
    two = prompts("ann", "bob")
    rows = [
        row([score(0, 4), score(0, 2)], name="codec", kind=CODEC),
        row([score(1, 4, math.nan, seconds=0.5), score(0, 2)], name="a@1"),
        row([score(1, 4), score(0, 2)], name="a@2"),
    ]
    rows[1].details["real_time_factor"] = 0.25
    found = report.build(rows, two, FPS, {})
    [kept] = found["utterances"][0]["scores"]["a@1"]
    assert kept["speaker_similarity"] is None and kept["duration_error"] == -0.5
    assert kept["word_errors"] == 1 and kept["words"] == 4
    assert found["utterances"][0]["recording_seconds"] == 1.0
    assert found["utterances"][0]["has_reference"] is False
    lines = Page("", [figures_table(found)]).text().splitlines()
    assert "WER" in lines[1] and "opinion" not in lines[1]
    [cells] = [line.split() for line in lines if line.startswith("a@1")]
    assert cells[:3] == ["a@1", "16.7", "%"] and cells[-1] == "0.25"
    assert {each["better"] for each in found["differences"]} == {None}
