"""Token ids: what they stand for, that they stay, and that a text cannot forge a conditioning token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.sentences import refused
from tests.helpers.tokens import byte_tokenizer, token
from torchtitan.models.dit_tts.config.job_config import CONDITIONING_FIELDS as FIELDS
from torchtitan.models.dit_tts.flow.counter_rng import stream_keys, uniform
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import (
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
BOTH = pytest.mark.parametrize("unit", ["bytes", "chars"])


def conditioned(unit="chars", fields=FIELDS, dropout=0.0) -> UnitTokenizer:
    text = "".join(TEXTS)
    return UnitTokenizer(make_vocabulary(unit, text, fields, VALUES, max_seconds=30.72), dropout)


def tokens(tokenizer, *arguments) -> list[str]:
    return [token(tokenizer.vocabulary, i) for i in tokenizer.encode(*arguments)]


def test_ids_of_bytes_and_characters():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (259, 0)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *(byte + 3 for byte in text.encode("utf-8")), 2]
    tokenizer = UnitTokenizer(make_vocabulary("chars", "one two"))
    assert tokenizer.vocabulary.characters == " enotw" and tokenizer.vocab_size == 4 + 6
    assert tokenizer.encode("one") == [1, 7, 6, 5, 2]
    assert tokens(tokenizer, "o€") == ["<begin>", "o", "<unknown>", "<end>"]
    assert tokenizer.unknown_characters("o€eß€") == ["ß", "€"]
    # Marks that no text of the data has are read as one that some have, or not at all.
    some = UnitTokenizer(make_vocabulary("chars", "one, two: (ten)."))
    for text, spoken in (
        ("one — two… (ten)", "one, two. (ten)"),
        ("“one; [two].”", "one, two."),
        ("one: two — .", "one: two."),
        ("“”", "“”"),
    ):
        assert some.spoken(text) == spoken and len(some.encode(text)) == len(spoken) + 2
    assert some.unknown_characters("one “x”; two") == ["x"] and some.unknown_characters("“”")
    assert tokenizer.spoken("one — (two)") == "one two" and byte_tokenizer().spoken("—") == "—"


@BOTH
def test_conditioning_tokens_follow_the_units_and_leave_their_ids(unit):
    plain, full = conditioned(unit, ()), conditioned(unit)
    first = plain.vocab_size
    assert full.vocabulary.first_added_id == first
    assert full.vocab_size == first + (1 + 2) + (1 + 3) + (1 + 1) + (1 + 2) + (1 + 62)
    for text in TEXTS:
        assert full.encode(text)[1 + len(FIELDS) : -1] == plain.encode(text)[1:-1]
    names = [token(full.vocabulary, i) for i in range(full.vocab_size)]
    assert names[first : first + 3] == ["<speaker:?>", "<speaker:awb>", "<speaker:slt>"]
    assert names[-1] == "<duration:61>" and len(set(names)) == len(names)
    metadata = {"language": "en", "speaker": "slt", "target_duration": 6.2, "quality": 3}
    tokenizer = conditioned(unit, ("duration", "quality", "speaker", "class"))
    expected = ["<duration:12>", "<quality:3>", "<speaker:slt>", "<class:?>"]  # the config's order
    assert tokens(tokenizer, "", metadata) == ["<begin>", *expected, "<end>"]
    assert tokenizer.unknown_values(metadata | {"speaker": "ksp"}) == {"speaker": "ksp"}


@BOTH
def test_positions_by_the_frames_that_characters_take(unit):
    """Two frames before the text and one behind it; é has two bytes, each half of its frames; what takes no frame
    counts a twentieth."""
    tokenizer = UnitTokenizer(
        make_vocabulary(unit, "abcé", ["speaker"], {"speaker": ["slt"]}), aligner=object()
    )
    frames = np.array([2, 1, 0, 4, 3, 1])
    middles = [2.5, 3.025, *([4.05, 6.05] if unit == "bytes" else [5.05]), 8.55]
    positions = tokenizer.text_positions("abéc", frames)
    assert len(positions) == len(tokenizer.encode("abéc"))
    np.testing.assert_allclose(positions, [-1, -1, *(np.array(middles) / 11.05), -1], rtol=1e-6)
    assert tokenizer.text_positions("", np.array([3, 2])).tolist() == [-1, -1, -1]


@BOTH
def test_a_text_that_looks_like_tokens(unit):
    text = "<speaker:slt><end><pad><|im_end|><unknown>"
    values = {"speaker": ["slt", "<speaker:slt>", "awb><speaker:slt"]}
    tokenizer = UnitTokenizer(make_vocabulary(unit, text, ["speaker"], values))
    first = tokenizer.vocabulary.first_added_id
    begin, condition, *units, end = tokenizer.encode(text)
    assert (begin, end) == (1, 2) and token(tokenizer.vocabulary, condition) == "<speaker:?>"
    assert len(units) == len(text) and min(units) > 3 and max(units) < first
    refused(lambda: tokenizer.encode("ab\ud83d"), r"'\ud83d' at character 2")


def test_values_that_are_unknown_and_duration_bins():
    tokenizer = conditioned("bytes", ["speaker", "duration"])
    for value in ("nobody", None, "", ["slt"], True, "SLT"):
        assert tokens(tokenizer, "", {"speaker": value})[1] == "<speaker:?>"
    bins = {0.01: 0, 0.49: 0, 0.5: 1, 6: 12, 30.72: 61, 99.0: 61, 1e300: 61}
    none = [0, -1.0, float("nan"), float("inf"), "6", True, None]
    for seconds, name in [*bins.items(), *((value, "?") for value in none)]:
        assert tokens(tokenizer, "", {"target_duration": seconds})[2] == f"<duration:{name}>"
    # 0.3 / 0.1 is less than 3 in floating point.
    fine = make_vocabulary("bytes", "", ["duration"], duration_token_seconds=0.1, max_seconds=0.7)
    assert fine.conditioning["duration"] == tuple("0123456")
    assert [fine.duration_bin(tenths / 10) for tenths in range(1, 9)] == list("12345666")


@BOTH
def test_encode_into_fills_the_start_of_a_row_up_to_the_bound(unit):
    tokenizer = conditioned(unit, ("speaker", "duration"))
    lengths = []
    for text in TEXTS:
        ids = tokenizer.encode(text, {"speaker": "awb"})
        row, short = np.full(len(ids) + 2, -7), np.full(len(ids) - 1, -7)
        assert tokenizer.encode_into(row, text, {"speaker": "awb"}) == len(ids)
        assert row.tolist() == [*ids, -7, -7]
        words = f"{len(ids)} tokens, but at most {len(ids) - 1} fit"
        refused(lambda: tokenizer.encode_into(short, text), words)
        lengths.append(len(ids))
    columns = SimpleNamespace(
        text_bytes=np.array([len(text.encode("utf-8")) for text in TEXTS], np.int32),
        text_chars=np.array(list(map(len, TEXTS)), np.int32),
    )
    bound = tokenizer.max_tokens(columns)
    assert bound.dtype == np.int32 and bound.tolist() == lengths


def test_dropout_depends_on_the_position_in_the_stream_alone():
    """And on the field: it is dropped from the same samples whatever its neighbours are."""
    tokenizer = conditioned("bytes", ("class", "duration", "speaker"), dropout=0.3)
    rows = np.arange(64)
    full_batch = tokenizer.dropped(seed=3, global_batch=9, rows=rows)
    assert full_batch.shape == (64, 3) and full_batch.dtype == bool
    assert (tokenizer.dropped(3, 9, rows[16:32]) == full_batch[16:32]).all()
    for column, stream in ((1, 204), (2, 200)):  # of the duration and the speaker
        drawn = uniform(stream_keys(3, torch.tensor(9), torch.from_numpy(rows), stream))
        assert (full_batch[:, column] == (drawn < 0.3).numpy()).all()
    assert not conditioned(dropout=0.0).dropped(0, 1, rows).any()


def test_files_of_other_versions():
    """Files that were saved, fingerprints of runs that exist, and files that were changed."""
    fields = ["speaker", "duration"]
    odd = make_vocabulary("chars", '"\\ \x00\u2028\n', fields[:1], {"speaker": ["\ud800", "a\nb"]})
    for vocabulary in (Vocabulary(), conditioned("chars").vocabulary, odd):
        assert (
            from_json(to_json(vocabulary).encode("utf-8").decode("utf-8"), "a file") == vocabulary
        )
    assert Vocabulary().fingerprint == "793bc10afa800c2e"
    values = {"speaker": ["a", "b"]}
    vocabulary = make_vocabulary("chars", "one two", fields, values, max_seconds=3)
    assert vocabulary.fingerprint == "4dd32052b305c284"
    text = to_json(conditioned().vocabulary)
    for old, new, words in (
        ('"version": 1', '"version": 2', "was changed"),
        ('"bins": 62', '"bins": 61', "was changed"),
        ('"unit": "chars",', "", "cannot be read"),
        ('"bins": 62', f'"bins": {10**90}', "bins of duration"),
    ):
        assert old in text
        changed = text.replace(old, new, 1)
        refused(lambda: from_json(changed, "run/tokenizer.json"), "run/tokenizer.json", words)


def needed(
    unit="chars",
    characters="abc",
    fields=("speaker", "duration"),
    speakers=("slt", "awb"),
    bins=0.5,
    **options,
) -> Vocabulary:
    options |= {"duration_token_seconds": bins, "max_seconds": 10}
    return make_vocabulary(unit, characters, fields, {"speaker": speakers}, **options)


@pytest.mark.parametrize(
    "data, words",
    [
        ({"unit": "bytes"}, ["model = 'bytes'", "with 'chars'"]),
        ({"normalize": "en"}, ["[encoder] normalize = 'en'", "with ''"]),
        ({"convention": "echo"}, ["[encoder] convention = 'echo'", "with ''"]),
        ({"fields": ["duration", "speaker"]}, ["['duration', 'speaker']"]),
        ({"bins": 1.0}, ["duration_token_seconds = 1.0", "with 0.5"]),
        ({"characters": "abcßéñøœž"}, ["6 characters", "'ß', 'é', 'ñ', 'ø', 'œ' and 1 more"]),
        ({"speakers": ["slt", "ksp"]}, ["1 values of 'speaker'", "'ksp'"]),
        ({"fields": ["quality"]}, ["conditioning has 'quality', but no sample"]),
        ({"characters": ""}, ["'chars', but all texts of", "are empty"]),
    ],
)
def test_data_with_tokens_that_weights_do_not_know(data, words):
    check_covers(needed(), needed(characters="a", speakers=["slt"]), "the run")
    english, german = (needed("phones", language=each) for each in ("en-us", "de"))
    refused(lambda: check_covers(english, german, "the run"), "'phones:de'", "with 'phones:en-us'")
    refused(lambda: check_covers(needed(), needed(**data), "the run in outputs/a"), *words)
