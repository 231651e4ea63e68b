"""A row becomes an utterance: its id, text, speaker, split, labels and reference; and a line of JSON."""

import datetime
import hashlib
import json

import numpy as np
import pytest

from titan_tts.prepare.listing import is_wanted
from titan_tts.records.columns import Columns, make_utterance, plain, sample_key
from titan_tts.records.utterance import Reference, Unusable, Utterance
from torchtitan.models.dit_tts.data.heldout import split_of


def item_of(row: dict, key: str = "k", **options) -> Utterance | Unusable:
    return make_utterance(row, key, {}, Columns(**options))


def test_keys_splits_and_values():
    names = ("./a/b.c.d", "/abs/x", "../../v1.2/x", "naïve", "/", "bad\udcff")
    keys = ["a/b_c_d", "abs/x", "v1_2/x", "naïve", "_", "bad\\udcff"]
    assert [sample_key(name) for name in names] == keys
    names = "train train-clean-360 Training dev-other test validation heldout x".split()
    assert [split_of(name) for name in names] == ["train"] * 3 + ["heldout"] * 4 + [None]
    value = {"a": float("inf"), 1: (b"x", datetime.date(2024, 5, 1)), "c": np.float64(2.5)}
    assert plain(value) == {"a": None, "1": [None, "2024-05-01"], "c": 2.5}


@pytest.mark.parametrize(
    "line, reference",
    [
        ('["a/b", "sch\\u00f6n", "ann", "heldout", {"text": "x", "n": 3}, {"file": "b.wav", "offset": 1.5}]', None),
        ('["a", "x", "b", "train", {}, {"file": "b.wav", "references": ["c.wav", "d.wav"]}]', Reference(("c.wav", "d.wav"))),
        ('["a", "x", "b", "train", {"reference_text": "so"}, {"references": ["c.wav"]}]', Reference(("c.wav",), "so")),
        ('["a", "x", "b", "train", {}, {"references": ["c.wav"], "reference_text": "so"}]', Reference(("c.wav",), "so")),
    ],
)  # fmt: skip
def test_lines_stay_as_earlier_work_folders_have_them(line, reference):
    """A source's digest is made of them, and by it a complete output is known again."""
    found = Utterance.from_json(line)
    assert found.to_json() == line and found.reference == reference
    assert [found.id, found.text, found.speaker, found.split, found.labels] == json.loads(line)[:5]
    assert not {"references", "reference_text"} & found.audio.keys()


def test_columns_become_an_utterance():
    item = item_of({"said": "x", "who": 3}, text_column="said", speaker_column="who", language="de")
    assert (item.text, item.speaker, item.labels["language"]) == ("x", "3", "de")
    assert Utterance.from_json(item.to_json()) == item
    own = item_of({"text": "x", "speaker": "s", "locale": "fr"}, language="de")
    assert own.labels["language"] == "fr"  # the option is for rows without one
    rows = ({"speaker": "ann"}, {"speaker": ""}, {}, {"speaker_id": 7}, {"speaker": 3.0})
    items = [item_of({"text": "x"} | row, speaker="someone") for row in rows]
    assert [item.speaker for item in items] == ["ann", "someone", "someone", "7", "3"]
    assert all(item.labels["speaker"] == item.speaker for item in items)
    for speaker in (3.5, True, " "):
        assert isinstance(item_of({"text": "x", "speaker": speaker}), Unusable)
    both = {"text": "x", "speaker": "s", "reference_text": "so"}
    made = make_utterance(both, "k", {}, Columns(), ["b.wav", "c.wav"])
    assert made.reference == Reference(("b.wav", "c.wav"), "so") and item.reference is None
    item = item_of({"sentence": "a", "text": "b", "client_id": "c", "speaker": "d"})
    assert (item.text, item.speaker) == ("b", "d")  # not the row's first


def test_texts_names_and_keys_are_composed():
    """What macOS writes as o and a combining diaeresis is one letter, and one speaker, however it is given."""
    row = {"text": "scho\u0308n", "text_verbatim": "a\u0308h", "tags": ["u\u0308"]}
    made = item_of(row | {"speaker": "Jo\u0308rg", "language": "franc\u0327ais"})
    expected = {"text": "sch\u00f6n", "text_verbatim": "\u00e4h", "tags": ["\u00fc"]}
    expected |= {"speaker": "J\u00f6rg", "language": "fran\u00e7ais"}
    assert (made.text, made.speaker, made.labels) == ("sch\u00f6n", "J\u00f6rg", expected)
    assert item_of(expected).labels == expected
    assert item_of({"text": "\ufb01 \u00b2"}, speaker="x").text == "\ufb01 \u00b2"  # not NFKC
    assert sample_key("Jo\u0308rg/1.wav") == sample_key("J\u00f6rg/1.wav") == "J\u00f6rg/1_wav"
    for given in ({"speaker": "Jo\u0308rg"}, {"speaker_pattern": "(Jo\u0308rg)"}):
        assert item_of({"text": "x"}, "J\u00f6rg_1", **given).labels["speaker"] == "J\u00f6rg"
    assert is_wanted(made, "speaker=Jo\u0308rg") and not is_wanted(made, "speaker=Jorg")


@pytest.mark.parametrize(
    "key, pattern, speaker",
    [
        ("p225_001", "^([^_]+)_", "p225"),
        ("a_b_1", r"_(\w+)_", "b"),  # anywhere in the key
        ("p225_001", r"^(\d+)_", None),
        ("p225_001", r"p(x)?", None),
    ],
)
def test_speakers_from_the_key(key, pattern, speaker):
    item = item_of({"text": "x"}, key, speaker_pattern=pattern, speaker="other")
    assert (item.speaker, item.labels["speaker"]) == (speaker or "other",) * 2
    given = item_of({"text": "x", "speaker_id": 7}, key, speaker_pattern=pattern)
    assert given.speaker == "7"  # a column goes first
    if speaker is None:
        unusable = item_of({"text": "x"}, key, speaker_pattern=pattern)
        assert f"--speaker-pattern = {pattern!r} finds none in its key" in unusable.sentence


@pytest.mark.parametrize("by", ["utterance", "speaker"])
def test_the_split_is_drawn_by_seed_and_given_ones_stay(by):
    def split(number: int, seed: int, **row: str) -> str:
        row = {"text": "x", "speaker": f"s{number // 2}"} | row
        options = {"heldout_by": by, "heldout_fraction": 0.3, "seed": seed}
        return item_of(row, f"k{number}", **options).split

    for seed in (0, 1):
        found = [split(n, seed) for n in range(200)]
        for number, one in enumerate(found):
            name = f"s{number // 2}" if by == "speaker" else f"k{number}"
            digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
            drawn = int.from_bytes(digest[:8], "little") / 2**64
            assert one == ("heldout" if drawn < 0.3 else "train")
        assert 30 < found.count("heldout") < 80
    assert {split(n, 0, split="train-clean") for n in range(50)} == {"train"}
    assert {split(n, 0, split="test-other") for n in range(50)} == {"heldout"}
