"""Conditions and characters that are asked for in generation, and what the run knows of them."""

import argparse

import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.inference import generate_command
from torchtitan.models.dit_tts.inference.evaluate import HeldOut, untrained_tokens
from torchtitan.models.dit_tts.text.tokenizer import Tokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary


def options(*arguments):
    parser = argparse.ArgumentParser()
    generate_command.add_arguments(parser)
    return parser.parse_args(["outputs/a", "--text=one", *arguments])


SPEAKING = Tokenizer(
    make_vocabulary(
        "chars",
        "one two",
        ["speaker", "language", "duration"],
        {"speaker": [f"s{number:02d}" for number in range(30)], "language": ["de", "en=gb"]},
        max_seconds=9,
    )
)


@pytest.mark.parametrize(
    "arguments, conditions",
    [
        ([], {}),
        (["--speaker", "s07"], {"speaker": "s07"}),
        (["--speaker", "of other archives"], {}),
        (["--language=de", "--speaker=s07"], {"language": "de", "speaker": "s07"}),
        (["--condition", "speaker=s03", "--reference=a.wav"], {"speaker": "s03"}),
        (["--condition", "speaker=s03", "--speaker=s07"], {"speaker": "s03"}),
        (["--condition=language=en=gb"], {"language": "en=gb"}),
    ],
)
def test_conditions_that_are_asked_for(arguments, conditions):
    assert generate_command.requested_conditions(options(*arguments), SPEAKING) == conditions


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--language=fr"], ["--language fr", "language 'fr'", "it knows: 'de', 'en=gb'"]),
        (["--condition=speaker=x"], ["speaker 'x'", "'s00', 's01'", "'s19' and 10 more"]),
        (["--quality=3"], ["--quality 3", "no conditioning token 'quality'", "speaker, language"]),
        (["--condition=mood=sad"], ["'mood'", "it has: speaker, language"]),
        (["--condition=duration=3"], ["'duration'", "--duration"]),
        (["--condition=speaker"], ["--condition speaker has no value", "FIELD=VALUE"]),
        (["--condition=language=de", "--language=de"], ["'language' is given twice"]),
    ],
)
def test_conditions_that_the_run_does_not_know(arguments, words):
    refused(lambda: generate_command.requested_conditions(options(*arguments), SPEAKING), *words)


def test_a_text_with_characters_that_the_run_does_not_know():
    generate_command.check_text("one", SPEAKING)
    refused(
        lambda: generate_command.check_text("oné ½", SPEAKING), "--text", "'½', 'é'", "' enotw'"
    )


def test_a_left_out_condition_of_a_run_without_dropout(capsys):
    generate_command.warn_of_untrained_tokens({"speaker": "s01"}, SPEAKING)
    assert "language not given" in capsys.readouterr().err
    trained = Tokenizer(SPEAKING.vocabulary, conditioning_dropout=0.1)
    generate_command.warn_of_untrained_tokens({}, trained)
    generate_command.warn_of_untrained_tokens({"speaker": "s01", "language": "de"}, SPEAKING)
    assert capsys.readouterr().err == ""


def test_heldout_samples_with_what_the_run_does_not_know():
    def item(text, **metadata):
        return HeldOut("k", "k", text, "", None, None, metadata)

    assert untrained_tokens([item("one", speaker="s00"), item("two")], SPEAKING) == []
    sentences = untrained_tokens(
        [item("one ß", speaker="x"), item("é", speaker="y", language="de")], SPEAKING
    )
    assert [sentence.split(" that ")[0] for sentence in sentences] == [
        "2 characters",
        "2 values of 'speaker'",
    ]
    assert "'ß', 'é'" in sentences[0] and "'x', 'y'" in sentences[1]
