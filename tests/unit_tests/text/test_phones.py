"""Phones instead of letters: what espeak-ng says, and the vocabulary, limits and positions that follow from it."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.sentences import refused
from titan_tts.speak.utterance import check_text
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.job_config import is_pretrained
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.run.grown_vocabulary import find_grown
from torchtitan.models.dit_tts.text.build_tokenizer import build_tokenizer, load_tokenizer
from torchtitan.models.dit_tts.text.phones import Phonemizer
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import PHONES as PHONES_UNIT
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary, to_json
from torchtitan.models.dit_tts.train_spec import get_train_spec

TEXTS = ["Three, four!", "434 pebbles", "", "naïve"]
# Of espeak-ng 1.52.
PHONES = ["θɹˈiː, fˈɔːɹ!", "fˈɔːɹhˈʌndɹɪd θˈɜːɾi fˈɔːɹ pˈɛbəlz", "", "naɪˈiːv"]


@pytest.fixture(scope="module")
def phones():
    return Phonemizer("en-us")


@pytest.fixture
def config(tmp_path):
    samples = make_samples(len(TEXTS), seed=1)
    for sample, text in zip(samples, TEXTS):
        sample.metadata["text"] = text
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/000000.tar", samples)
    options = ["--encoder.model=phones:en-us", "--model.text_positions=none"]
    found = load_config([f"--data.path={tmp_path / 'data'}", *options])
    found.job.dump_folder = str(tmp_path / "run")
    return found


def test_texts_are_spoken_with_numbers_stress_and_punctuation(phones):
    assert [phones(text) for text in TEXTS] == PHONES
    assert phones(" Three,\n four! ") == phones("Three,\0four!\0") == PHONES[0]
    assert phones("about 3.5.").endswith("fˈaɪv")  # whatever phonemizer makes of the dots
    assert phones.counts(TEXTS) == list(map(len, PHONES))
    # Shards of other programs may hold half of a surrogate pair; the sample is told when it is read.
    assert phones.counts(["a\ud83d", "a?"]) == [len(phones("a?"))] * 2
    texts = [f"{number} pebbles of Anna" for number in range(40)]
    alone = list(map(phones._phones, texts))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(phones._phones, texts * 4)) == alone * 4
    added = Phonemizer("en-us", AddedTokens(["(笑)"]))
    assert not added.lost("hello(笑) there") and added.lost("笑 there") == ["笑"]


@pytest.mark.parametrize(
    "language, text, lost",
    [
        # What the language reads, some of it by the rules of another one.
        ("ja", "「コーヒー」、と いいました。 ジャズ ABC", ""),
        ("cmn", "你好，世界！二 Hello", ""),
        ("ko", "안녕하세요 꿨다 쓸쓸 ㅋㅋ", ""),
        ("hi", "नमस्ते ज़िंदगी अक्षर", ""),
        ("ar", "مرحبا العربيّة ء", ""),
        ("th", "ภาษาไทย ๆ", ""),
        ("de", "Buchstabe, schöne Straße, Łódź, αβγ", ""),
        ("en-us", "the letter ñ: naïve café, 안녕, Москва, α-particle, 😀", ""),
        # What it does not: "Chinese letter", "Hebrew shin", "letter 1 e c 5", and nothing.
        ("ja", "1984年、私は ー", "年私"),
        ("cmn", "こん 々", "こん"),
        ("de", "Москва שלום", "Москваשלום"),
        ("en-us", "മ שלום ไทย Nguyễn 東京 京都", "മשלוםไทยễ東京都"),
        ("chr-US-Qaaa-x-west", "ᏣᎳᎩ", "ᏣᎳᎩ"),
    ],
)
def test_letters_that_are_not_read(language, text, lost):
    assert Phonemizer(language).lost(text) == list(lost)


def test_a_run_refuses_what_its_phones_lose(config, tmp_path):
    """In training before anything is written, in generation by name."""
    start = get_train_spec().build_tokenizer_fn
    tokenizer = start(config)
    assert (tmp_path / "run/durations.json").exists()
    check_text("three pebbles", tokenizer)
    refused(lambda: check_text("three 日", tokenizer), "'日'")
    refused(lambda: check_text("three joy joy", tokenizer), "'ʒ'", "in 'joy'); phones:en-us knows")
    samples = make_samples(3, seed=1)
    for sample, text in zip(samples, ["three", "in 東京 and 京都", "in 京都"], strict=True):
        sample.metadata["text"] = text
    write_shard(tmp_path / "data/000001.tar", samples)
    config.encoder.vocab_size, config.job.dump_folder = 0, str(tmp_path / "other")
    refused(lambda: start(config), "2 of 7 texts", "'京', '都', '東'", samples[1].key, "'chars'")
    assert not (tmp_path / "other").exists()


def test_weights_of_one_language_begin_another(config, tmp_path):
    """Shared phones keep their rows, and texts of the first language can still be read; a resume may not change it."""
    config.encoder.normalize = "en"
    build_tokenizer(config)
    started, numbers = tmp_path / "run/checkpoint/step-3", Phonemizer("es")
    started.mkdir(parents=True)
    (started / ".metadata").write_bytes(b"")
    config.encoder.model, config.encoder.normalize, config.encoder.vocab_size = "phones:es", "", 0
    refused(lambda: build_tokenizer(config), "'phones:es'", "was trained with 'phones:en-us'")
    config.checkpoint.initial_load_path = str(started)
    config.job.dump_folder = str(tmp_path / "spanish")
    vocabulary = build_tokenizer(config).vocabulary
    # The grammar says "four hundred and".
    english, spanish = {"æ", *"".join(PHONES)}, set("".join(map(numbers, TEXTS)))
    assert set(vocabulary.characters) == english | spanish and spanish - english
    name, rows = find_grown(config, tmp_path / "spanish")
    before = sorted(english)
    for row, character in enumerate(vocabulary.characters, 4):
        assert rows[row] == (4 + before.index(character) if character in english else 3)
    folder, again = tmp_path / "spanish", "phones:en-us"
    for encoder, said in (
        ("", numbers(TEXTS[1])),
        ("phones:es", numbers(TEXTS[1])),
        (again, PHONES[1]),
    ):
        assert load_tokenizer(folder, config, encoder).spoken(TEXTS[1]) == said
    refused(lambda: load_tokenizer(folder, config, "en-us"), "reads phones:es; give phones:LANG")
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes/tokenizer.json").write_text(to_json(Vocabulary()))
    config.encoder.model = "bytes"
    refused(lambda: load_tokenizer(tmp_path / "bytes", config, again), "reads bytes, not phones")


def test_what_is_missing_is_said(monkeypatch):
    refused(lambda: Phonemizer("klingon-x"), "phones:klingon-x", "de", "en-us")
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    refused(lambda: Phonemizer("en-us"), "pip install phonemizer espeakng_loader")


def test_a_run_has_the_vocabulary_of_its_phones(config, tmp_path):
    tokenizer = build_tokenizer(config)
    known = "".join(sorted(set("".join(PHONES))))
    assert tokenizer.vocabulary.characters == known and not is_pretrained("phones:en-us")
    ids = tokenizer.encode(TEXTS[0])
    assert ids == [1, *(4 + known.index(c) for c in PHONES[0]), 2]
    assert tokenizer.unknown_characters("pay") == ["e"]
    assert not tokenizer.unknown_characters(TEXTS[1])
    assert tokenizer.spoken("Three") == "θɹˈiː"
    spans = tokenizer.spans("Three")
    assert np.array_equal(spans[1:-1], [[i, i + 1] for i in range(5)]) and not spans[[0, -1]].any()
    counts = tokenizer.max_tokens(open_dataset(config.data.path))
    assert counts.tolist() == [len(each) + 2 for each in PHONES]
    stored = load_tokenizer(tmp_path / "run", config)
    assert stored.vocabulary == tokenizer.vocabulary
    assert stored.encode("fourth") == tokenizer.encode("fourth")


def test_rare_phones_and_marks_are_read_as_others_and_need_no_tokens(config, tmp_path):
    """New data with "Bach;" needs no more than the weights have, as neither do an adapter and generation; where k and a
    comma have no token themselves, x is unknown, and the mark goes."""
    build_tokenizer(config)
    (tmp_path / "run/checkpoint/step-3").mkdir(parents=True)
    (tmp_path / "run/checkpoint/step-3/.metadata").write_bytes(b"")
    assert UnitTokenizer(Vocabulary(PHONES_UNIT, "bˈɑː", language="en-us")).unknown_characters(
        "Bach;"
    ) == ["x"]
    known = "".join(sorted({*"".join(PHONES), *"ɑkʌjtu"}))
    (tmp_path / "run/tokenizer.json").write_text(
        to_json(Vocabulary(PHONES_UNIT, known, language="en-us"))
    )
    samples = make_samples(2, seed=2)
    for sample, text in zip(samples, ["Bach; pebbles", "Utrecht four"]):
        sample.metadata["text"] = text
    write_shard(tmp_path / "data/000001.tar", samples)
    config.encoder.vocab_size, config.job.dump_folder = 0, str(tmp_path / "new")
    config.checkpoint.initial_load_path = str(tmp_path / "run/checkpoint/step-3")
    tokenizer = build_tokenizer(config)
    assert tokenizer.vocabulary.characters == known and find_grown(config, tmp_path / "new") is None
    assert tokenizer.spoken("Bach; pebbles") == "bˈɑːk, pˈɛbəlz"
    assert tokenizer.text_ids("Bach") == [4 + known.index(c) for c in "bˈɑːk"]
