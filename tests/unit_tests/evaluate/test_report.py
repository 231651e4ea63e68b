"""Figures, differences and tables, by hand."""

import math

import pytest
import torch

from titan_tts.evaluate import report
from titan_tts.evaluate.prompts import Prompt
from titan_tts.evaluate.report import CODEC, RECORDINGS, SYSTEM, Row
from torchtitan.models.dit_tts.speech.scoring.scores import UtteranceScore
from torchtitan.models.dit_tts.speech.scoring.word_errors import Errors

FPS = 25.0


def prompts(*speakers: str) -> list[Prompt]:
    """Recordings of one second."""
    return [
        Prompt(f"k{n}", f"k{n}", "t", s, {}, latents=torch.zeros(25, 1))
        for n, s in enumerate(speakers)
    ]


def score(errors: int, words: int, similarity=None, opinion=None, seconds=1.0) -> UtteranceScore:
    return UtteranceScore(
        "", Errors(errors, words, 2 * errors, 5 * words), similarity, opinion, seconds
    )


def row(*seeds: list[UtteranceScore], name="a@1", kind=SYSTEM) -> Row:
    return Row(name, kind, list(range(len(seeds))), [list(seed) for seed in seeds])


def test_rates_are_of_all_words_and_all_seeds():
    seeds = [score(1, 4), score(0, 2)], [score(2, 4), score(2, 2)]
    found = report.figures_of(row(*seeds), prompts("ann", "bob"), FPS)
    assert found["wer"]["value"] == 5 / 12  # not the mean of the two utterances
    assert found["cer"]["value"] == pytest.approx(10 / 60)
    assert found["wer"]["low"] <= 5 / 12 <= found["wer"]["high"]
    assert found["speaker_similarity"] is None and found["opinion"] is None
    by_speaker = report.rates_by_speaker(row(*seeds), prompts("ann", "bob"))
    assert by_speaker == {"ann": 3 / 8, "bob": 2 / 4}
    assert report.rates_by_speaker(row([score(0, 0)]), prompts("ann")) == {}


def test_means_leave_out_what_is_missing():
    seeds = [[score(0, 1, similarity=0.5, seconds=0.9), score(0, 1, seconds=1.2)]]
    two = prompts("ann", "bob")
    found = report.figures_of(row(*seeds), two, FPS)
    assert found["speaker_similarity"]["value"] == 0.5
    assert found["duration_error"]["value"] == pytest.approx((0.1 + 0.2) / 2)
    two[1].latents = None
    found = report.figures_of(row(*seeds), two, FPS)
    assert found["duration_error"]["value"] == pytest.approx(0.1)
    assert report.figures_of(row(*seeds, kind=CODEC), two, FPS)["duration_error"] is None


def test_figures_without_words_are_null():
    found = report.figures_of(row([score(1, 0)]), prompts("ann"), FPS)
    assert found["wer"] == {"value": None, "low": None, "high": None}
    assert report.unfit([{"name": "codec", "kind": CODEC, "figures": found}]) == ""


def test_differences_name_the_better_system_or_a_tie():
    many = prompts(*["ann"] * 30)
    good = row([score(0, 4, 0.9, 4.0)] * 30, name="good@1")
    bad = row([score(n % 4, 4, 0.9 - 0.01 * (n % 3), 4.0) for n in range(30)], name="bad@1")
    beside = row([score(0, 4)] * 30, name="codec", kind=CODEC)
    found = report.differences([beside, bad, good], many, FPS)
    assert {(one["first"], one["second"]) for one in found} == {("bad@1", "good@1")}
    by_figure = {one["figure"]: one for one in found}
    errors = sum(n % 4 for n in range(30))
    assert by_figure["wer"]["value"] == pytest.approx(errors / 120)
    assert by_figure["wer"]["low"] > 0 and by_figure["wer"]["better"] == "good@1"
    assert by_figure["speaker_similarity"]["value"] < 0
    assert by_figure["speaker_similarity"]["better"] == "good@1"
    assert by_figure["opinion"]["better"] is None and by_figure["duration_error"]["better"] is None
    (pair,) = {one["better"] for one in report.differences([good, bad], many, FPS)} - {None}
    assert pair == "good@1"
    assert report.differences([good], many, FPS) == []


def test_the_worst_utterances_come_first():
    """By the systems alone, over all seeds; the voice decides between equals."""
    recordings = row([score(4, 4), score(0, 4), score(0, 4), score(0, 4)], kind=RECORDINGS)
    first = [score(0, 4, 0.9), score(1, 4), score(0, 4, 0.2), score(1, 4)]
    second = [score(0, 4, 0.9), score(0, 4), score(0, 4, 0.2), score(1, 4)]
    assert report.worst_first([recordings, row(first, second)], 4) == [3, 1, 2, 0]


def test_a_recognizer_that_errs_in_real_speech_is_named():
    def table(**wer):
        return [{"name": n, "kind": n, "figures": {"wer": {"value": v}}} for n, v in wer.items()]

    assert "98.8 % on the codec" in report.unfit(table(codec=0.988))
    assert "30.0 % on the recordings" in report.unfit(table(recordings=0.3, codec=0.4))
    assert (
        report.unfit(table(recordings=0.01, codec=0.9)) == ""
    )  # the codec is bad, not the recognizer
    assert report.unfit(table(system=1.0)) == ""


def test_what_json_cannot_hold_is_null():
    scores = [score(0, 1, similarity=math.nan, opinion=3.0)]
    found = report.build([row(scores)], prompts("ann"), FPS, {"seconds": 1.0})
    (one,) = found["utterances"]
    (kept,) = one["scores"]["a@1"]
    assert kept["speaker_similarity"] is None and kept["opinion"] == 3.0
    assert kept["word_errors"] == 0 and kept["words"] == 1 and kept["duration_error"] == 0
    assert one["recording_seconds"] == 1.0 and one["has_reference"] is False


def test_the_tables_of_the_terminal():
    two = prompts("ann", "bob")
    rows = [
        row([score(0, 4), score(0, 2)], name="codec", kind=CODEC),
        row([score(1, 4), score(0, 2)], name="a@1"),
        row([score(1, 4), score(0, 2)], name="a@2"),
    ]
    rows[1].details["real_time_factor"] = 0.25
    lines = report.text_tables(report.build(rows, two, FPS, {})).splitlines()
    assert "WER" in lines[0] and "opinion" not in lines[0]
    found = [line.split() for line in lines if line.startswith("a@1")]
    assert found[0][:3] == ["a@1", "16.7", "%"] and found[0][-1] == "0.25"
    assert found[1] == ["a@1", "25.0", "%", "0.0", "%"]
    assert all(line[:3] == ["a@1", "-", "a@2"] and line[-1] == "tie" for line in found[2:])
