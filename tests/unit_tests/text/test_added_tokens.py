"""Tokens in a text that the config declares: their ids, what reads them and what does not, and growth of a vocabulary."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.data_checks import check_text
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.text.hf_tokenizer import (
    SubwordTokenizer,
    TextTokenizer,
    load_subword_tokenizer,
)
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import (
    SUBWORDS,
    from_json,
    grown,
    make_vocabulary,
    missing_tokens,
    rows_in,
    to_json,
)

TOKENS = ("[S1]", "[S2]", "(laugh)", "(laugh)!")
TEXT = "[S1] hé (laugh)![S2](laugh)"


def tokenizer_of(unit, **options) -> UnitTokenizer:
    vocabulary = make_vocabulary(unit, "ab hé(", added=TOKENS, **options)
    assert from_json(to_json(vocabulary), "a file") == vocabulary
    return UnitTokenizer(vocabulary)


def test_the_longest_token_at_a_place_is_found():
    added = AddedTokens(TOKENS)
    one, two, laugh, loud = added.characters
    assert added.joined(TEXT) == f"{one} hé {loud}{two}{laugh}"
    assert added.without(TEXT) == "hé" and added.without("a [S1] b") == "a b"
    # 4 letters, " hé ", 8 letters, 4 letters, 7 letters
    expected = [0, 1, 1, 1, 1, 2, 3, 4, 5, *[6] * 8, *[7] * 4, *[8] * 7]
    assert added.places(TEXT).tolist() == expected
    # A text that has the character itself has no token there.
    assert added.joined("[s1] (laugh") == "[s1] (laugh"
    assert added.joined(f"a{two}b") == "a\ufffdb"
    none = AddedTokens(())
    assert none.joined(TEXT) == none.without(TEXT) == TEXT


def test_ids_of_bytes_and_characters():
    in_bytes, in_characters = tokenizer_of("bytes"), tokenizer_of("chars")
    space, h, e = 32 + 3, 104 + 3, [0xC3 + 3, 0xA9 + 3]
    assert in_bytes.encode(TEXT) == [1, 259, space, h, *e, space, 262, 260, 261, 2]
    assert in_bytes.vocab_size == 263
    # " (abhé" are 4 to 9
    assert in_characters.encode(TEXT) == [1, 10, 4, 8, 9, 4, 13, 11, 12, 2]
    assert in_characters.unknown_characters("[S1] x") == ["x"]
    spans = in_bytes.spans("[S1]é[S2]")
    assert spans.tolist() == [[0, 0], [0, 1], [1, 1.5], [1.5, 2], [2, 3], [0, 0]]


def test_phones_leave_them_alone():
    known = "".join(sorted(set("hˈaɪ, θɹˈiː")))
    vocabulary = make_vocabulary("phones", known, language="en-us", added=TOKENS)
    tokenizer = UnitTokenizer(vocabulary)
    one, two, laugh = (vocabulary.first_added_id + n for n in range(3))
    hi, three = tokenizer.encode("Hi,")[1:-1], tokenizer.encode("3")[1:-1]
    said = tokenizer.encode("[S1] Hi, [S2](laugh) 3")
    assert said == [1, one, *hi, two, laugh, *three, 2]
    assert tokenizer._phones.counts(["[S1] Hi"]) == [1 + len(hi) - 1]


@pytest.mark.parametrize("name", ["t5gemma2", "t5"])
def test_ids_beyond_those_of_a_pretrained_tokenizer(checkpoints, name):
    plain = load_subword_tokenizer(str(checkpoints[name]))
    given = {"subwords": plain.vocabulary.subwords, "added": TOKENS}
    vocabulary = make_vocabulary(SUBWORDS, "", ("speaker",), {"speaker": ["slt"]}, **given)
    tokenizer = SubwordTokenizer(vocabulary, plain.text)
    text = "one [S2] two(laugh) three"
    ids = tokenizer.encode(text, {"speaker": "slt"})
    assert ids[0] == 512 + 4 + 1 and tokenizer.vocab_size == 512 + 4 + 2
    assert [i for i in ids if 512 <= i < 516] == [513, 514]
    own = [i for i in ids[1:] if i < 512]
    theirs = Tokenizer.from_str(plain.text.to_json())
    assert theirs.decode(own, skip_special_tokens=True).split() == "one two three".split()
    assert tokenizer.text.counts([text]) == [len(ids) - 1]
    # Its own special tokens stay letters.
    assert max(tokenizer.text_ids("<eos></s>")) < 512
    assert len(tokenizer.spoken(text)) == len("one # two# three")
    places = {i: span for i, span in zip(ids, tokenizer.spans(text).tolist(), strict=True)}
    assert places[513] == [4, 5] and places[514] == [9, 10]


def test_a_tokenizer_that_lowers_letters_finds_them_as_they_are_written():
    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "(laugh)": 2}, unk_token="?"))
    words.normalizer, words.pre_tokenizer = (
        normalizers.Lowercase(),
        pre_tokenizers.WhitespaceSplit(),
    )
    text = TextTokenizer(words.to_str(), AddedTokens(("(Laugh)", "[S1]")), 100)
    assert text.ids("[S1] One (Laugh) (laugh) [s1] (LAUGH)") == [101, 1, 100, 2, 0, 2]


def test_each_token_keeps_its_row_when_a_vocabulary_grows():
    """The rows of a table that holds each token's name."""
    fields, options = ("speaker", "duration"), {"max_seconds": 1.0}
    run = make_vocabulary("chars", "bd", fields, {"speaker": ["m"]}, added=("(a)",), **options)
    data = make_vocabulary("chars", "ac", fields, {"speaker": ["k"]}, added=("(b)",), **options)
    assert missing_tokens(run, data) == (
        "2 characters ('a', 'c'), 1 added tokens ('(b)'), 1 values of 'speaker' ('k')"
    )
    new = grown(run, data)
    assert not missing_tokens(new, data) and not missing_tokens(new, run)
    before = ["pad", "begin", "end", "?", *"bd", "(a)", "who", "m", "long", "0", "1"]
    now = ["pad", "begin", "end", "?", *"abcd", "(a)", "(b)", "who", "k", "m", "long", "0", "1"]
    rows = rows_in(run, new)
    assert len(rows) == new.size == len(now) and run.size == len(before)
    for row, name in zip(rows, now, strict=True):
        # A new letter begins as the unknown one, a new speaker as an unknown one, an added token anew.
        expected = {"a": "?", "c": "?", "k": "who", "(b)": None}.get(name, name)
        assert (before[row] if row >= 0 else None) == expected


@pytest.mark.parametrize("tokens", [[""], [" a"], ["a", "a"]])
def test_what_cannot_be_a_token(tokens):
    config = load_config([])
    config.encoder.added_tokens = tokens
    refused(lambda: check_text(config), "[encoder] added_tokens", "without blanks")
