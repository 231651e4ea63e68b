"""The corpus of sentences and its referee, but for the voices (flite is no Python package)."""

import itertools
import json

import numpy as np
import pytest

from benchmarks.sentences import corpus, grammar
from benchmarks.sentences.trigram import write_trigram


def test_sentences_are_a_function_of_the_seed_and_the_set():
    first = list(itertools.islice(grammar.sentences(3, "train"), 50))

    assert list(itertools.islice(grammar.sentences(3, "train"), 50)) == first
    assert not set(first) & set(itertools.islice(grammar.sentences(4, "train"), 50))
    assert all(text[0].isupper() or text[0].isdigit() for text in first)
    assert all(text[-1] in ".?" for text in first)


def test_a_word_that_is_kept_out_is_in_no_training_sentence_and_once_in_each_of_its_own():
    kept = grammar.kept_out()
    trained = itertools.islice(corpus.training_texts(0), 5000)
    words = {word for text in trained for word in grammar.words_of(text)}
    tests = corpus.test_texts(0)

    assert 60 < len(kept) < 90
    assert not words & kept
    assert len({word for word in words if word.isalpha()}) > 1450
    for text in tests["new_word"]:
        assert sum(word in kept for word in grammar.words_of(text)) == 1


def test_held_out_texts_are_not_trained():
    tests = set(itertools.chain.from_iterable(corpus.test_texts(0).values()))

    assert len(tests) == sum(corpus.TESTS.values())
    assert not tests & set(itertools.islice(corpus.training_texts(0), 5000))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (7, "seven"),
        (20, "twenty"),
        (21, "twenty one"),
        (90, "ninety"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (415, "four hundred fifteen"),
        (999, "nine hundred ninety nine"),
    ],
)
def test_numbers_are_spelled(number, said):
    assert grammar.spelled(number) == said


def test_every_word_is_in_the_recognizers_dictionary_and_sounds_like_no_other():
    pytest.importorskip("pocketsphinx")
    from benchmarks.sentences.referee import pronunciations

    words = {
        form.lower()
        for entries in grammar.lexicon().values()
        for entry in entries
        for form in grammar.forms(entry)
    }
    sounds: dict[str, str] = {}
    for word in sorted(words):
        sound = " ".join(pronunciations()[word])
        assert sound not in sounds, (word, sounds[sound])
        sounds[sound] = word


def test_a_trigram_gives_the_words_behind_any_history_a_probability_of_one(tmp_path):
    write_trigram([["a", "b", "a"], ["a", "a", "c"], ["b", "c"]], tmp_path / "x.arpa")
    probability, backoff = read_arpa((tmp_path / "x.arpa").read_text())

    def of(word, history):
        if (*history, word) in probability:
            return probability[(*history, word)]
        return backoff.get(history, 1.0) * of(word, history[1:])

    for history in [(), ("a",), ("c",), ("<s>", "a"), ("b", "a"), ("a", "c"), ("c", "b")]:
        total = sum(of(word, history) for word in ("a", "b", "c", "</s>"))
        assert total == pytest.approx(1.0, abs=2e-3), history
    assert of("a", ("<s>",)) == pytest.approx((2 - 0.7) / 3 + 0.7 * 2 / 3 * 4 / 11, abs=1e-4)


def read_arpa(text):
    probability, backoff, order = {}, {}, 0
    for line in text.splitlines():
        if line.endswith("-grams:"):
            order = int(line[1])
        elif order and line and line[0] in "-0123456789":
            value, *rest = line.split()
            gram = tuple(rest[:order])
            probability[gram] = 10 ** float(value)
            if rest[order:]:
                backoff[gram] = 10 ** float(rest[order])
    probability[("<s>",)] = 0.0
    return probability, backoff


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
    new_voice = [json.loads(line) for line in (size / "new_voice.jsonl").open()]
    assert {(row["speaker"], row["split"]) for row in new_voice} == {("awb", "test")}


def test_without_flite_the_program_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.shutil, "which", lambda name: None)

    with pytest.raises(corpus.InputError, match="apt-get install flite"):
        corpus.speak_corpus(tmp_path, 1, seed=0, jobs=1)


def test_noise_and_silence_are_no_words():
    pytest.importorskip("pocketsphinx")
    import torch

    from benchmarks.sentences.referee import PhoneReferee, words
    from torchtitan.models.dit_tts.speech.scoring.interface import Sound
    from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

    noise = 0.1 * np.random.default_rng(0).standard_normal(32_000).astype(np.float32)
    referee = words("cpu")

    assert referee.transcribe(Sound(torch.zeros(16_000), 16_000)) == ""
    assert len(referee.transcribe(Sound(torch.from_numpy(noise), 16_000)).split()) < 4
    phones = PhoneReferee()
    assert len(phones.transcribe(Sound(torch.from_numpy(noise), 16_000)).split()) < 20
    # By PocketSphinx's dictionary; a normalizer drops words such as "uh" and "hm".
    assert phones.units("The 2 books.") == "phdh phah pht phuw phb phuh phk phs"
    assert count_errors(phones.units("book"), phones.units("look")).words == 3


@pytest.mark.parametrize("learned", ["latents", "outputs"])
def test_a_learned_reference_begins_as_the_recording_and_is_every_samples(learned):
    pytest.importorskip("pocketsphinx")
    import torch

    from benchmarks.sentences.inversion import LearnedReference

    class Pairs(torch.nn.Module):
        """Twice the sum of every two frames."""

        def forward(self, latents, mask):
            return 2.0 * (latents[:, ::2] + latents[:, 1::2]), mask[:, ::2]

    reference = torch.arange(24.0).view(6, 4)
    module = LearnedReference(Pairs(), reference, learned)
    found, valid = module(torch.zeros(3, 9, 4), torch.zeros(3, 9, dtype=torch.bool))
    found.sum().backward()

    expected = torch.stack([2.0 * (reference[i] + reference[i + 1]) for i in (0, 2, 4)])
    assert torch.equal(found, expected.expand(3, 3, 4)) and valid.shape == (3, 3) and valid.all()
    assert torch.equal(module.values[0], {"latents": reference, "outputs": expected}[learned])
    factor = {"latents": 6.0, "outputs": 3.0}[learned]  # three samples, times two of the encoder
    assert torch.equal(module.values.grad, torch.full_like(module.values, factor))
