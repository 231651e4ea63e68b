"""Token ids: what they are, that they stay, and that a text cannot forge a conditioning token."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.tokens import token
from torchtitan.models.dit_tts.config.job_config import CONDITIONING_FIELDS as FIELDS
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.counter_rng import stream_keys, uniform
from torchtitan.models.dit_tts.text.tokenizer import (
    UnitTokenizer,
    byte_tokenizer,
)
from torchtitan.models.dit_tts.text.vocabulary import (
    BYTE_VOCAB_SIZE,
    CharWidths,
    Vocabulary,
    check_covers,
    from_json,
    make_vocabulary,
    to_json,
)

TEXTS = [
    "",
    "three one four",
    "Füße, Ærø, naïve: 12 €",
    "сорок два",
    "四十二、はい",
    "a\u0301 \U0001f642 \U0010ffff\x00\n",
]
VALUES = {
    "speaker": ["slt", "awb"],
    "language": ["en", "de", "日本語"],
    "quality": ["3"],
    "class": ["read", "told"],
}


def conditioned(unit: str = "chars", fields=FIELDS, dropout: float = 0.0) -> UnitTokenizer:
    return UnitTokenizer(
        make_vocabulary(
            unit, "".join(TEXTS), fields, VALUES, duration_token_seconds=0.5, max_seconds=30.72
        ),
        dropout,
    )


def tokens(tokenizer: UnitTokenizer, *arguments) -> list[str]:
    return [token(tokenizer.vocabulary, i) for i in tokenizer.encode(*arguments)]


# Ids


def test_bytes_have_the_ids_they_always_had():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.num_special_tokens) == (259, 0, 2)
    assert tokenizer.vocab_size == tokenizer.get_vocab_size() == BYTE_VOCAB_SIZE
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *(byte + 3 for byte in text.encode("utf-8")), 2]


def test_characters_come_by_code_point_after_four_special_ids():
    tokenizer = UnitTokenizer(make_vocabulary("chars", "one two"))
    assert tokenizer.vocabulary.characters == " enotw"
    assert tokenizer.vocab_size == 4 + 6
    assert tokenizer.encode("one") == [1, 7, 6, 5, 2]
    assert tokens(tokenizer, "o€") == ["<begin>", "o", "<unknown>", "<end>"]
    assert tokenizer.unknown_characters("o€eß€") == ["ß", "€"]


def test_conditioning_tokens_come_after_the_units_and_leave_their_ids():
    for unit in ("bytes", "chars"):
        plain, full = conditioned(unit, ()), conditioned(unit)
        first = plain.vocab_size
        assert full.vocabulary.first_conditioning_id == first
        assert full.vocab_size == first + (1 + 2) + (1 + 3) + (1 + 1) + (1 + 2) + (1 + 62)
        for text in TEXTS:
            units = plain.encode(text)[1:-1]
            assert full.encode(text)[1 + len(FIELDS) : -1] == units
        names = [token(full.vocabulary, i) for i in range(first, full.vocab_size)]
        assert names[:3] == ["<speaker:?>", "<speaker:awb>", "<speaker:slt>"]
        assert names[-1] == "<duration:61>"
        every = [token(full.vocabulary, i) for i in range(full.vocab_size)]
        assert len(set(every)) == len(every)


def test_the_order_of_the_data_does_not_matter():
    again = {name: list(reversed(values)) * 2 for name, values in VALUES.items()}
    made = make_vocabulary("chars", reversed("".join(TEXTS)), FIELDS, again, max_seconds=30.72)
    assert made == conditioned().vocabulary
    assert made.fingerprint == conditioned().vocabulary.fingerprint
    fewer = replace(made, characters=made.characters[:-1])
    swapped = conditioned(fields=FIELDS[::-1]).vocabulary
    assert len({made.fingerprint, fewer.fingerprint, swapped.fingerprint}) == 3


def test_tokens_stand_in_the_order_of_the_config():
    metadata = {"language": "en", "speaker": "slt", "target_duration": 6.2, "quality": 3}
    fields = ("duration", "quality", "speaker", "class")
    tokenizer = conditioned("bytes", fields)
    expected = "<begin> <duration:12> <quality:3> <speaker:slt> <class:?> <0x61> <end>"
    assert " ".join(tokens(tokenizer, "a", metadata)) == expected
    assert tokenizer.unknown_values(metadata | {"speaker": "ksp"}) == {"speaker": "ksp"}


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_places_are_of_the_text_alone(unit):
    tokenizer = conditioned(unit)
    rows = [tokenizer.encode(text, {"speaker": "slt"}) for text in ("abcd", "a", "")]
    ids = np.full((3, 16), 5, np.int64)  # an id of text in the padding
    mask = np.zeros((3, 16), bool)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = own, True
    first = 1 + len(FIELDS)
    positions = tokenizer.text_positions(ids, mask)
    assert positions.dtype == np.float32
    assert positions[0, first : first + 4].tolist() == [0.125, 0.375, 0.625, 0.875]
    assert positions[1, first] == 0.5
    positions[0, first : first + 4] = positions[1, first] = -1
    assert (positions == -1).all()


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_positions_by_the_frames_that_characters_take(unit):
    per_byte = np.full(256, 0.5)
    per_byte[list(b"abc")] = 1, 3, 4
    vocabulary = replace(make_vocabulary(unit, "abc"), char_widths=CharWidths(tuple(per_byte), 2.0))
    tokenizer = UnitTokenizer(vocabulary)
    ids = np.array([tokenizer.encode("abca")])
    positions = tokenizer.text_positions(ids, np.ones_like(ids, bool))
    expected = [-1, 2.5 / 13, 4.5 / 13, 8 / 13, 10.5 / 13, -1]
    np.testing.assert_allclose(positions[0], expected, rtol=1e-6)
    # An unknown character takes as long as the mean of the known ones, an unknown byte its own time.
    ids, unknown = np.array([tokenizer.encode("axc")]), 0.5 if unit == "bytes" else 8 / 3
    positions, total = tokenizer.text_positions(ids, np.ones_like(ids, bool)), 9 + unknown
    expected = np.array([2.5, 3 + unknown / 2, 5 + unknown]) / total
    np.testing.assert_allclose(positions[0, 1:-1], expected, rtol=1e-6)


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_round_trip(unit):
    tokenizer = conditioned(unit)
    for text in TEXTS:
        ids = tokenizer.encode(text, {"speaker": "slt", "target_duration": 3})
        assert tokenizer.decode([*ids, tokenizer.pad_id, tokenizer.pad_id]) == text
    unseen = tokenizer.decode(tokenizer.encode("one ß ж"))
    assert unseen == ("one ß ж" if unit == "bytes" else "one ß \ufffd")


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_a_text_cannot_forge_a_token(unit):
    text = "<speaker:slt><end><pad><|im_end|><unknown>"
    values = {"speaker": ["slt", "<speaker:slt>", "awb><speaker:slt"]}
    tokenizer = UnitTokenizer(make_vocabulary(unit, text, ["speaker"], values))
    first = tokenizer.vocabulary.first_conditioning_id
    begin, condition, *units, end = tokenizer.encode(text)
    assert (begin, end) == (1, 2) and token(tokenizer.vocabulary, condition) == "<speaker:?>"
    assert len(units) == len(text) and min(units) > 3 and max(units) < first
    assert tokenizer.decode([begin, condition, *units, end]) == text
    # A value that looks like another's token is a token of its own.
    ids = {tokenizer.encode("", {"speaker": value})[1] for value in values["speaker"]}
    assert len(ids) == 3 and min(ids) > first


# Conditions


@pytest.mark.parametrize("value", ["nobody", None, "", ["slt"], {"name": "slt"}, True, "SLT"])
def test_missing_and_unseen_values_are_unknown(value):
    for metadata in ({}, {"speaker": value}):
        assert tokens(conditioned("bytes", ["speaker"]), "", metadata)[1] == "<speaker:?>"


def test_duration_bins():
    tokenizer = conditioned("bytes", ["duration"])
    bins = {0.01: 0, 0.49: 0, 0.5: 1, 6: 12, 30.72: 61, 99.0: 61, 1e300: 61}
    none = [0, -1.0, float("nan"), float("inf"), "6", True, None]
    for seconds, name in [*bins.items(), *((value, "?") for value in none)]:
        assert tokens(tokenizer, "", {"target_duration": seconds})[1] == f"<duration:{name}>"


def test_bins_are_not_moved_by_the_division():
    """0.3 / 0.1 is less than 3 in floating point."""
    vocabulary = make_vocabulary(
        "bytes", "", ["duration"], duration_token_seconds=0.1, max_seconds=0.7
    )
    assert vocabulary.conditioning["duration"] == tuple("0123456")
    assert [vocabulary.duration_bin(tenths / 10) for tenths in range(1, 9)] == list("12345666")


def test_a_field_without_a_value_in_the_data():
    for values in ({}, {"class": []}):
        with pytest.raises(InputError, match="conditioning has 'class', but no sample"):
            make_vocabulary("bytes", "", ["class"], values)
    with pytest.raises(InputError, match="'chars', but all texts of .* are empty"):
        make_vocabulary("chars", "")


# Into the loader's rows


@pytest.mark.parametrize("unit", ["bytes", "chars"])
@pytest.mark.parametrize("fields", [(), ("speaker", "duration")])
def test_encode_into_fills_the_start_of_a_row(unit, fields):
    tokenizer = conditioned(unit, fields)
    metadata = {"speaker": "awb", "target_duration": 2.0}
    for text in TEXTS:
        ids = tokenizer.encode(text, metadata)
        rows = np.full((3, len(ids) + 2), -7, np.int64)
        assert tokenizer.encode_into(rows[1], text, metadata) == len(ids)
        assert rows[1].tolist() == [*ids, -7, -7] and (rows[[0, 2]] == -7).all()
        short = np.full(len(ids) - 1, -7, np.int64)
        with pytest.raises(InputError, match=f"{len(ids)} tokens where at most {len(ids) - 1} fit"):
            tokenizer.encode_into(short, text, metadata)
        assert (short == -7).all()


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_the_bound_on_tokens_holds_and_is_reached(unit):
    tokenizer = conditioned(unit, ("speaker", "class"))
    columns = SimpleNamespace(
        text_bytes=np.array([len(text.encode("utf-8")) for text in TEXTS], np.int32),
        text_chars=np.array([len(text) for text in TEXTS], np.int32),
    )
    bound = tokenizer.max_tokens(columns)
    assert bound.dtype == np.int32
    assert bound.tolist() == [len(tokenizer.encode(text)) for text in TEXTS]
    assert bound[TEXTS.index("")] == tokenizer.num_special_tokens == 4


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_half_a_surrogate_pair_is_no_text(unit):
    with pytest.raises(InputError, match="'\\\\ud83d' at character 2"):
        conditioned(unit).encode("ab\ud83d")


# Dropout


def test_dropped_conditions_are_unknown_and_the_rest_stays():
    tokenizer = conditioned(fields=("speaker", "language", "duration"))
    metadata = {"speaker": "slt", "language": "en", "target_duration": 6.0}
    kept = tokens(tokenizer, "one", metadata)
    assert kept[1:4] == ["<speaker:slt>", "<language:en>", "<duration:12>"]
    drop = np.array([[False, True, False]])
    dropped = tokens(tokenizer, "one", metadata, drop[0])
    assert dropped == [*kept[:2], "<language:?>", *kept[3:]]
    everything = tokens(tokenizer, "one", metadata, [True] * 3)
    assert everything == tokens(tokenizer, "one")


def test_dropout_depends_on_the_place_in_the_stream_alone():
    tokenizer = conditioned("bytes", ("speaker", "duration"), dropout=0.3)
    rows = np.arange(64)
    full_batch = tokenizer.dropped(seed=3, global_batch=9, rows=rows)
    assert full_batch.shape == (64, 2) and full_batch.dtype == bool
    assert (tokenizer.dropped(3, 9, rows[16:32]) == full_batch[16:32]).all()
    for column, stream in enumerate((200, 204)):  # of the speaker and the duration
        drawn = uniform(stream_keys(3, torch.tensor(9), torch.from_numpy(rows), stream))
        assert (full_batch[:, column] == (drawn < 0.3).numpy()).all()
    # A field is dropped from the same samples whatever its neighbours and the vocabulary are.
    other = conditioned("chars", ("class", "duration", "speaker"), dropout=0.3)
    assert (other.dropped(3, 9, rows)[:, [2, 1]] == full_batch).all()
    for changed in (tokenizer.dropped(4, 9, rows), tokenizer.dropped(3, 8, rows)):
        assert (changed != full_batch).any()
    assert not conditioned(dropout=0.0).dropped(0, 1, rows).any()
    assert conditioned(dropout=1.0).dropped(0, 1, rows).all()


# On disk


@pytest.mark.parametrize(
    "vocabulary",
    [
        Vocabulary(),
        conditioned("bytes").vocabulary,
        conditioned("chars").vocabulary,
        make_vocabulary("chars", '"\\ \x00\u2028\n', ["speaker"], {"speaker": ["\ud800", "a\nb"]}),
    ],
)
def test_saved_and_loaded(vocabulary, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(to_json(vocabulary).encode("utf-8"))
    loaded = from_json(file.read_text("utf-8"), str(file))
    assert loaded == vocabulary and loaded.fingerprint == vocabulary.fingerprint


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('"version": 1', '"version": 2', "was changed"),
        ('"bins": 62', '"bins": 61', "was changed"),
        ('"unit": "chars"', '"unit": "words"', "was changed"),
        ('"unit": "chars",', "", "cannot be read"),
    ],
)
def test_a_file_that_was_changed(old, new, words):
    text = to_json(conditioned().vocabulary)
    assert old in text
    with pytest.raises(InputError, match=f"^run/tokenizer.json .*{words}"):
        from_json(text.replace(old, new, 1), "run/tokenizer.json")


# What weights know


def test_data_with_fewer_values_is_covered():
    run = conditioned().vocabulary
    values = {name: some[:1] for name, some in VALUES.items()}
    fewer = make_vocabulary("chars", "one", FIELDS, values, max_seconds=99)
    check_covers(run, fewer, "the run")
    check_covers(run, run, "the run")


@pytest.mark.parametrize(
    "needed, words",
    [
        ({"unit": "bytes"}, "model = 'bytes'.* with 'chars'"),
        ({"fields": ["duration", "class", "speaker"]}, "'duration', 'class', 'speaker'"),
        ({"seconds": 1.0}, "duration_token_seconds = 1.0.* with 0.5"),
        ({"characters": "abcßéñøœж"}, "6 characters.*'ß', 'é', 'ñ', 'ø', 'œ' and 1 more"),
        ({"speakers": ["slt", "ksp"]}, "1 values of 'speaker'.*'ksp'"),
    ],
)
def test_data_with_other_tokens_is_refused(needed, words):
    def vocabulary(
        unit="chars",
        characters="abc",
        fields=("speaker", "class", "duration"),
        speakers=("slt", "awb"),
        seconds=0.5,
    ):
        values = {"speaker": speakers, "class": ["read"]}
        return make_vocabulary(
            unit, characters, fields, values, duration_token_seconds=seconds, max_seconds=10
        )

    with pytest.raises(InputError, match=words):
        check_covers(vocabulary(), vocabulary(**needed), "the run in outputs/a")
