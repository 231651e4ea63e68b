"""Tokenizers of pretrained encoders: their ids are those of Hugging Face."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.helpers.sentences import refused, sentence_of
from tests.helpers.tokens import token
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.text import token_counts
from torchtitan.models.dit_tts.text.hf_tokenizer import (
    SubwordTokenizer,
    TextTokenizer,
    load_subword_tokenizer,
)
from torchtitan.models.dit_tts.text.vocabulary import (
    SUBWORDS,
    Subwords,
    Vocabulary,
    from_json,
    make_vocabulary,
    to_json,
)

TEXTS = [
    "",
    " ",
    "one two three",
    "  seven  eight ",
    "In 2024: 12.5 % of 1,000",
    "Füße, naïve; сорок два 四十二",
    "a\u0301 \U0001f642 \U0010ffff\x00\n",
]
SPECIALS = "<eos></s><bos> one <pad></s><unk><speaker:slt>"
VALUES = {"speaker": ["slt", "awb"], "quality": ["3"]}
FIELDS = ("speaker", "duration", "quality")


@pytest.fixture(scope="module", params=["t5gemma2", "t5"])
def model(request, checkpoints):
    return checkpoints[request.param]


def conditioned(folder):
    plain = load_subword_tokenizer(str(folder))
    subwords = plain.vocabulary.subwords
    vocabulary = make_vocabulary(SUBWORDS, "", FIELDS, VALUES, max_seconds=10, subwords=subwords)
    return SubwordTokenizer(vocabulary, plain.text)


def unigram(byte_fallback=False, ends="</s>"):
    """As T5's own: special tokens are pieces of the model, and there are no bytes."""
    letters = "abcdefghijklmnopqrstuvwxyz/."
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *letters, "\u2581one", "<extra>"]
    scores = [0.0 if piece[0] == "<" else -float(number) for number, piece in enumerate(pieces)]
    model = models.Unigram(list(zip(pieces, scores)), unk_id=2, byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {ends}", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def test_ids_are_those_of_hugging_face(model):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(model), load_subword_tokenizer(str(model))
    for text in TEXTS:
        assert ours.text_ids(text) == theirs(text)["input_ids"], text
    assert ours.text.counts(TEXTS) == [len(ids) for ids in theirs(TEXTS)["input_ids"]]
    assert ours.text_ids(SPECIALS) == theirs(SPECIALS, split_special_tokens=True)["input_ids"]
    assert (ours.pad_id, ours.base, ours.vocab_size) == (theirs.pad_token_id, 512, 512)
    # The specials that the model's own rules add.
    assert ours.text_ids("") == {"t5gemma2": [2], "t5": [1]}[model.name]


def test_conditions_come_first(model):
    tokenizer = conditioned(model)
    for text in [*TEXTS, SPECIALS]:
        ids = tokenizer.encode(text, {"speaker": "slt", "target_duration": 2.0})
        assert ids[3:] == tokenizer.text_ids(text) and max(ids[3:]) < 512  # none is forged
        named = [token(tokenizer.vocabulary, i) for i in ids[:3]]
        assert named == ["<speaker:slt>", "<duration:4>", "<quality:?>"]
    assert min(tokenizer.encode("")) == tokenizer.text_ids("")[0] and tokenizer.vocab_size == 538
    counts = "2 values of speaker, 20 values of duration, 1 values of quality"
    assert tokenizer.vocabulary.describe() == f"538 ids: 512 of {model}, {counts}"
    loaded = from_json(to_json(tokenizer.vocabulary), "a file")
    assert loaded == tokenizer.vocabulary and loaded.model == str(model)
    assert loaded.subwords.pad_id == tokenizer.pad_id


def test_texts_and_rows_that_are_refused(model, tmp_path):
    tokenizer, text = conditioned(model), TextTokenizer(unigram().to_str())
    for call in (tokenizer.encode, tokenizer.text_ids, text.unknown_characters):
        refused(lambda: call("ab\ud83d"), r"'\ud83d' at character 2")

    for base in (text.end, text.end - 1):
        vocabulary = Vocabulary(SUBWORDS, subwords=Subwords(base, text.fingerprint, model="a/b"))
        if base == text.end:
            SubwordTokenizer(vocabulary, text)
    refused(lambda: SubwordTokenizer(vocabulary, text), "'a/b'", f"vocab_size = {text.end - 1}")

    shutil.copy(model / "config.json", tmp_path)
    # transformers makes one of 104 pieces here, which would read all text as unknown.
    refused(lambda: load_subword_tokenizer(str(tmp_path)), str(tmp_path), "cannot be loaded")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(lambda: load_subword_tokenizer(str(tmp_path)), str(tmp_path), "cannot be loaded")


def test_settings_of_the_file_have_no_say():
    plain, changed = unigram(), unigram()
    changed.enable_truncation(3)
    changed.enable_padding(length=50, direction="left")
    plain, changed = (TextTokenizer(each.to_str()) for each in (plain, changed))
    assert changed.ids("one one one one") == plain.ids("one one one one")
    assert changed.fingerprint == plain.fingerprint

    contents = json.loads(Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).to_str())
    contents["model"]["dropout"] = 0.5
    certain = TextTokenizer(json.dumps(contents))
    assert {tuple(certain.ids("ab")) for _ in range(30)} == {(2,)}
    # An empty field, which another version of the library may have, changes nothing.
    contents["model"] |= {"dropout": None, "fuse_unk": False}
    found = TextTokenizer(json.dumps(contents)).fingerprint
    assert found == certain.fingerprint == "27c3ab806f0bd672"  # as runs have it
    others = (unigram(byte_fallback=True), unigram(ends="</s> </s>"))
    made = [plain, certain, *(TextTokenizer(each.to_str()) for each in others)]
    assert len({text.fingerprint for text in made}) == 4


def test_characters_that_have_no_id():
    tokenizer = TextTokenizer(unigram().to_str())
    assert tokenizer.unknown_characters("one Ä ßÄ b") == ["Ä", "ß"]
    # Complete words are unknown to this kind of model.
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TextTokenizer(words.to_str()).unknown_characters("ab aÄ") == ["Ä"]


def counting(tokenizer):
    """The tokenizer, and a list to which every text that it counts is added."""
    counted, count = [], tokenizer.text.counts
    tokenizer.text.counts = lambda texts: counted.extend(texts) or count(texts)
    return tokenizer, counted


def test_counts_are_exact_and_stored(model, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(token_counts, "_TEXTS_AT_ONCE", 4)  # of 10 in a shard
    data = make_shards(tmp_path / "shards", 30, shards=3, channels=8)
    dataset = open_dataset(str(data), 8)
    tokenizer, counted = counting(conditioned(model))
    metadata = dataset.metadata_of(range(len(dataset)))
    expected = [len(tokenizer.encode(m["text"], m)) for m in metadata]
    found = tokenizer.max_tokens(dataset)
    assert found.dtype == np.int32 and found.tolist() == expected and len(counted) == 30
    # Any run with this tokenizer takes them; the last of two ranks begins elsewhere, to the same end.
    again, counted = counting(load_subword_tokenizer(str(model)))
    assert (again.max_tokens(dataset, (1, 2)) + 3).tolist() == expected and not counted
    # A corrupt sample counts its bytes, and its shard is not stored.
    corrupt = shutil.copytree(data, tmp_path / "corrupt")
    opened = open_dataset(str(corrupt), 8)
    flip_bits(corrupt / "000001.tar", [3 * 4 + 2])  # the JSON of the shard's fifth sample
    for stored in corrupt.glob("*.tokens-*"):
        stored.unlink()
    some = tokenizer.max_tokens(opened)
    assert np.flatnonzero(some != found).tolist() == [14]
    assert some[14] == opened.text_bytes[14] + 3 and len(list(corrupt.glob("*.tokens-*"))) == 2
    # A corrupt file is made again, and only it; another tokenizer has files of its own.
    file = data / f"000001.tar.idx.tokens-{tokenizer.text_fingerprint}"
    stored = file.read_bytes()
    file.write_bytes(stored[:-1] + b"x")
    assert (again.max_tokens(dataset) + 3).tolist() == expected and len(counted) == 10
    assert file.read_bytes() == stored
    [other] = {"t5", "t5gemma2"} - {model.name}
    other, counted = counting(load_subword_tokenizer(str(checkpoints[other])))
    other.max_tokens(dataset)
    assert len(counted) == 30


def test_a_tokenizer_of_another_kind_is_told_as_that(checkpoints, tmp_path):
    """The library reads it as the kind of its model's type, or fails in its own words."""
    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(40))]
    for name, count, has_class, said in (
        ("t5", 43, False, "its tokenizer.json holds a WordLevel"),
        ("bert", 43, False, "(a model of this type is read with a WordPiece; its tokenizer.json"),
        ("t5", 9, True, "(it has 6 pieces for letters, and needs 16, as where"),
        ("t5", 0, False, "(it has 1 pieces for letters, and needs 16, as where"),
    ):
        folder = tmp_path / f"{name}-{count}"
        shutil.copytree(checkpoints[name], folder)
        for path in folder.glob("token*"):
            path.unlink()
        level = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words[:count])}, "<unk>"))
        if has_class:
            special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
            PreTrainedTokenizerFast(tokenizer_object=level, **special).save_pretrained(folder)
        elif count:
            level.save(str(folder / "tokenizer.json"))
        message = sentence_of(load_subword_tokenizer, str(folder))
        assert said in message and ("WordLevel" in message) is bool(count)
        assert message.endswith("; give a complete folder, whose files belong together")
