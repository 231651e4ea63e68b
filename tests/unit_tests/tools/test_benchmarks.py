"""The benchmarks' own parts: which cases are measured, the corpus of sentences, and its referee."""

import itertools
import json

import numpy as np
import pytest
import torch

from benchmarks import few_steps, sampling
from benchmarks.sentences import corpus, grammar
from benchmarks.sentences.trigram import write_trigram
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling


def test_every_case_can_be_sampled_and_keeps_to_its_budget():
    cases = list(sampling.cases(Sampling(steps=32, text_scale=2.0), "bfloat16"))
    assert {case.group for case in cases} == set(sampling.GROUPS)
    names = [(case.group, case.budget, case.name) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        check_sampling(case.sampling)
        assert not case.budget or case.budget * 0.5 < sampling.passes(case.sampling) <= case.budget
    saved = [sampling.passes(case.sampling) for case in cases if case.group == "savings"]
    assert saved[0] == 32 * 2 and saved == sorted(saved, reverse=True)


def test_distance_is_relative_and_over_all_frames():
    wanted = [torch.full((3, 2), 2.0), torch.full((1, 2), 2.0)]
    found = [wanted[0] + 1.0, wanted[1] - 1.0]
    assert few_steps.distance(found, wanted) == 0.5
    found[0] = wanted[0]  # three of four frames are right
    assert few_steps.distance(found, wanted) == 0.25


def test_held_out_words_and_texts_are_in_no_training_sentence():
    kept = grammar.kept_out()
    trained = set(itertools.islice(corpus.training_texts(0), 3000))
    words = {word for text in trained for word in grammar.words_of(text)}
    tests = corpus.test_texts(0)
    assert 60 < len(kept) < 90 and not words & kept
    assert not set(itertools.chain.from_iterable(tests.values())) & trained
    for text in tests["new_word"]:
        assert sum(word in kept for word in grammar.words_of(text)) == 1
    again = itertools.islice(corpus.training_texts(0), 50)
    assert set(again) <= trained


@pytest.mark.parametrize(
    ("number", "said"),
    [(7, "seven"), (20, "twenty"), (21, "twenty one"), (90, "ninety"), (100, "one hundred")]
    + [(415, "four hundred fifteen"), (999, "nine hundred ninety nine")],
)
def test_numbers_are_spelled(number, said):
    assert grammar.spelled(number) == said


def test_a_trigram_gives_the_words_behind_any_history_a_probability_of_one(tmp_path):
    write_trigram([["a", "b", "a"], ["a", "a", "c"], ["b", "c"]], tmp_path / "x.arpa")
    probability, backoff, order = {("<s>",): 0.0}, {}, 0
    for line in (tmp_path / "x.arpa").read_text().splitlines():
        if line.endswith("-grams:"):
            order = int(line[1])
        elif order and line and line[0] in "-0123456789":
            value, *rest = line.split()
            gram = tuple(rest[:order])
            probability.setdefault(gram, 10 ** float(value))
            if rest[order:]:
                backoff[gram] = 10 ** float(rest[order])

    def of(word, history):
        if (*history, word) in probability:
            return probability[(*history, word)]
        return backoff.get(history, 1.0) * of(word, history[1:])

    for history in [(), ("a",), ("c",), ("<s>", "a"), ("b", "a"), ("a", "c"), ("c", "b")]:
        total = sum(of(word, history) for word in ("a", "b", "c", "</s>"))
        assert total == pytest.approx(1.0, abs=2e-3), history
    assert of("a", ("<s>",)) == pytest.approx((2 - 0.7) / 3 + 0.7 * 2 / 3 * 4 / 11, abs=1e-4)


def test_sizes_contain_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.shutil, "which", lambda name: name)
    monkeypatch.setattr(corpus, "speak", lambda text, voice, path: 0.1 * len(text))
    lists = []
    for hours in (0.02, 0.1):
        size = corpus.speak_corpus(tmp_path, hours, seed=0, jobs=2)
        rows = [json.loads(line) for line in (size / "recordings.jsonl").open()]
        lists.append([row for row in rows if row["split"] == "train"])
        heard = sum(row["seconds"] for row in lists[-1])
        assert heard - lists[-1][-1]["seconds"] < hours * 3600 <= heard
    assert lists[1][: len(lists[0])] == lists[0] and len(lists[1]) > 3 * len(lists[0])
    assert {row["speaker"] for row in lists[1]} == {voice.name for voice in corpus.VOICES}


def test_noise_and_silence_are_no_words():
    pytest.importorskip("pocketsphinx")
    from benchmarks.sentences.referee import words
    from torchtitan.models.dit_tts.speech.scoring.interface import Sound

    noise = 0.1 * np.random.default_rng(0).standard_normal(32_000).astype(np.float32)
    referee = words("cpu")
    assert referee.transcribe(Sound(torch.zeros(16_000), 16_000)) == ""
    assert len(referee.transcribe(Sound(torch.from_numpy(noise), 16_000)).split()) < 4
