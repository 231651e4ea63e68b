"""The synthesizer: batches, lengths, long texts, and `from_pretrained`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP
from tests.helpers.sentences import refused
from titan_tts import from_pretrained
from titan_tts.speak.generate import Narrator
from titan_tts.speak.long_text import clean_text, ended, split_text
from titan_tts.speak.request_lists import Request
from titan_tts.speak.sampling_options import SamplingOptions
from titan_tts.speak.utterance import Speech, Utterance, Voice, join, part
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer


def test_alone_as_in_a_batch(synthesizer, monkeypatch):
    texts = ["one", "two one two one", "one"]
    voices = ["ann", Voice(torch.ones(3, CHANNELS)), None]
    together = synthesizer.synthesize(texts, voices, seed=2)
    for text, voice, speech in zip(texts, voices, together, strict=True):
        [alone] = synthesizer.synthesize([text], [voice], seed=2)
        torch.testing.assert_close(alone.waveform, speech.waveform, atol=1e-5, rtol=0)
        assert speech.sample_rate == 100 and len(speech.waveform) == HOP * len(speech.latents)
    # A text's noise is of its speaker, too; another seed is another noise.
    own = replace(synthesizer.sampling, text_scale=1.0)
    others = [synthesizer.synthesize(["one"], ["ann"], *more)[0] for more in ((3,), (2, own))]
    for other in (together[2], *others):
        assert not torch.equal(together[0].waveform, other.waveform)
    for_all = synthesizer.synthesize(["one", "one two"], ["ann"], seed=2)
    torch.testing.assert_close(for_all[0].waveform, together[0].waveform, atol=1e-5, rtol=0)
    assert synthesizer.synthesize([]) == []
    refused(lambda: synthesizer.synthesize(texts, ["ann", "bob"]), "3 texts with 2 voices")
    refused(lambda: synthesizer.synthesize(["one"], ["eve"]), "--speaker = eve", "'ann', 'bob'")
    refused(lambda: synthesizer.synthesize(["one", "  "]), "a text is empty")
    monkeypatch.setattr(
        UnitTokenizer, "unknown_characters", lambda _, text: sorted({*text} & {"ö"})
    )
    refused(lambda: synthesizer.synthesize(["one", "öne"]), "'öne' has characters", "'ö'")


def test_options_from_python(tmp_path, monkeypatch):
    for options, *words in (
        ({"dtype": "bf16"}, "dtype = 'bf16'", "auto, float32, bfloat16"),
        ({"compile": True}, "compile = True", "off, default, graphs, reduce-overhead"),
    ):
        refused(lambda given=options: from_pretrained("run", **given), *words)
    with pytest.raises(TypeError, match="banana"):
        from_pretrained("run", banana=1)
    load = "titan_tts.speak.sampling_options.load_synthesizer"
    monkeypatch.setattr(load, lambda options: options)
    found = from_pretrained(tmp_path, data="shards", step=3, duration="fit")
    assert found == SamplingOptions(run=str(tmp_path), data="shards", step=3, duration="fit")


def test_speech_that_the_model_ends_itself_is_cut_there(synthesizer, monkeypatch):
    run = synthesizer.run
    objective = replace(run.config.objective, loss_on_padding=True)
    own = replace(synthesizer, run=replace(run, config=replace(run.config, objective=objective)))
    made = torch.ones(40, CHANNELS)
    made[12:] = 0
    monkeypatch.setattr("titan_tts.speak.synthesizer.generate_latents", lambda *_: [made])
    [speech], [whole] = (each.synthesize(["one"]) for each in (own, synthesizer))
    assert len(speech.waveform) == 12 * HOP and len(whole.waveform) == 40 * HOP
    # Its length is not known beforehand, and a wav begins with it.
    assert [own.streams(kind) for kind in ("wav", "pcm", "flac")] == [False, True, False]
    assert synthesizer.streams("wav")


def test_what_a_voice_is_given_as(synthesizer, tmp_path):
    latents, path = torch.ones(3, CHANNELS), tmp_path / "voice.npy"
    np.save(path, latents.numpy())
    for given in (latents, path, Voice(latents)):
        assert torch.equal(synthesizer.voice(given).reference, latents)
    assert synthesizer.voice(None) == Voice() and synthesizer.voice("bob").speaker == "bob"
    assert synthesizer.recording(path, text="one").text == "one"
    assert torch.equal(
        Voice(torch.arange(9.0)).latents(synthesizer.run.config.data), torch.arange(6.0)
    )


def test_references_of_two_speakers_share_the_limit(synthesizer, tmp_path):
    """In their order; the run takes six frames, three of each."""
    paths = [tmp_path / f"{length}.npy" for length in (9, 2)]
    for path, length in zip(paths, (9, 2)):
        np.save(path, length + np.arange(length, dtype=np.float32)[:, None].repeat(CHANNELS, 1))
    for given in (paths, tuple(map(str, paths))):
        assert synthesizer.voice(given).reference[:, 0].tolist() == [9, 10, 11, 2, 3]
    assert synthesizer.recording(paths[::-1]).reference[:, 0].tolist() == [2, 3, 9, 10, 11]
    assert len(synthesizer.recording(paths[:1]).reference) == 9  # alone it is whole
    refused(lambda: synthesizer.recording(paths, text="a"), "reference text with 2 references")


def test_speed_and_length(synthesizer):
    ann = synthesizer.speaker("ann")
    usual = Utterance("one two one two", ann)
    given = Utterance("one", ann, frames=50, speed=2.0)
    frames = synthesizer.frames([usual, given, replace(usual, speed=2.0), usual])
    assert frames[0] == frames[3] and frames[1:3] == [50, round(frames[0] / 2)]
    assert synthesizer.conditions(ann) == {"speaker": "ann"}
    assert synthesizer.conditions(Voice(None, "eve")) == {}


def test_texts_are_composed(synthesizer):
    """As `prepare` composes them."""
    heard = synthesizer.pieces(Utterance("o\u0308", Voice(text="u\u0308")))[0]
    assert (heard.text, heard.voice.text) == ("\u00f6", "\u00fc")
    assert clean_text(" o\u0308") == "\u00f6"


def test_long_texts_are_said_in_pieces(synthesizer):
    data = synthesizer.run.config.data
    data.max_frames, data.max_text_tokens = 8, 100
    whole = Utterance("One two one. " * 3 + "two, " * 20, synthesizer.speaker("ann"))
    pieces = synthesizer.pieces(whole)
    assert len(pieces) > 2 and max(synthesizer.frames(pieces)) <= 8
    assert " ".join(piece.text for piece in pieces).split() == whole.text.split()
    unmeasured = [replace(piece, frames=None) for piece in pieces]
    assert synthesizer.frames(unmeasured) == synthesizer.frames(pieces)
    slow, fast = (synthesizer.pieces(replace(whole, speed=speed)) for speed in (0.5, 2.0))
    assert len(slow) > len(pieces) > len(fast) and max(synthesizer.frames([*slow, *fast])) <= 8
    data.max_frames, data.max_text_tokens = 10_000, 20
    asked, usual = [], synthesizer.lengths
    heard = lambda said: asked.extend(said) or usual.estimate(said)  # noqa: E731
    synthesizer.lengths = replace(usual, estimate=heard)
    for texts in (synthesizer.pieces(whole), asked):  # no predictor is asked of longer ones
        lengths = [len(synthesizer.run.tokenizer.encode(each.text)) for each in texts]
        assert max(lengths) <= 20 and len(lengths) > 3
    # So they are from Python, too: in their order, whatever batches their lengths make.
    short, long = synthesizer.synthesize(["one", whole])
    parts = [synthesizer.synthesize([piece])[0] for piece in synthesizer.pieces(whole)]
    joined = join(parts).waveform
    torch.testing.assert_close(long.waveform, joined, atol=1e-5, rtol=0)
    assert len(long.latents) == sum(len(each.latents) for each in parts)
    assert len(short.waveform) == HOP * len(short.latents) < len(joined)
    [given] = synthesizer.pieces(replace(whole, frames=25))
    assert given == replace(whole, text=whole.text.strip(), frames=25)


def test_a_stream_is_in_order_and_its_first_piece_is_said_alone(synthesizer, monkeypatch):
    synthesizer.run.config.data.max_frames = 4
    batches, speak = [], synthesizer.speak
    monkeypatch.setattr(synthesizer, "speak", lambda r, *a: batches.append(len(r)) or speak(r, *a))
    words = ("one two one", "a", "two two two two", "one", "one two")
    pieces = [Utterance(each, synthesizer.speaker("ann")) for each in words]
    for low_latency, expected in ((False, [2, 2, 1]), (True, [1, 2, 2])):
        said = list(synthesizer.stream(pieces, 0, 2, low_latency))
        assert [len(each.latents) for each in said] == synthesizer.frames(pieces)
        assert batches == expected
        batches.clear()


def test_what_exceeds_a_wav_is_told_before_it_is_said(synthesizer, monkeypatch):
    monkeypatch.setattr(type(synthesizer), "samples", lambda self, pieces: 2**31)
    monkeypatch.setattr(synthesizer, "speak", None)
    request = Request("here", "one")
    for out in ("a.WAV", ""):
        refused(lambda out=out: Narrator(synthesizer).write(request, out, "wav"), "4 GiB")


def at_most(characters: int):
    return lambda texts: [len(each.strip()) / characters for each in texts]


def test_a_model_that_has_read_full_stops_is_given_one(synthesizer, monkeypatch):
    """Without, it breaks off in the last sound."""
    known = replace(synthesizer.run.tokenizer.vocabulary, characters="., einotw")
    ends = ("two", "two.", "(two)", "two,", "天", "two -", "'two!'", "5")
    said = ("two.", "two.", "(two).", "two,", "天", "two -.", "'two!'", "5.")
    assert tuple(ended(each, known.characters) for each in ends) == said
    assert ended("two", "eotw") == "two"
    for vocabulary, alike in ((synthesizer.run.tokenizer.vocabulary, False), (known, True)):
        monkeypatch.setattr(synthesizer.run.tokenizer, "vocabulary", vocabulary)
        heard = [each.waveform for each in synthesizer.synthesize(["one two", "one two."])]
        assert (len(heard[0]) == len(heard[1]) and torch.equal(*heard)) is alike


def test_where_a_text_is_split():
    for text, characters, pieces in (
        ('He said "Go." Then he went; as ever', 14, ['He said "Go."', "Then he went;", "as ever"]),
        ("incomprehensibilities now", 9, ["incompreh", "ensibilit", "ies now"]),
        ("Dr. Who and J. Bach. Yes!", 20, ["Dr. Who and J. Bach.", "Yes!"]),
        ("Mrs. A of St. B? Prof. C.", 16, ["Mrs. A of St. B?", "Prof. C."]),
        # Ordinals, abbreviations by letters, and numbers behind short words end no sentence and are not cut.
        ("Er kam am 3. Mai 2024 an.", 12, ["Er kam am", "3. Mai 2024", "an."]),
        ("Es gibt z. B. Hunde u. a. Tiere.", 16, ["Es gibt", "z. B. Hunde", "u. a. Tiere."]),
        ("Also (d. h. nie) und z.B. Rom.", 17, ["Also (d. h. nie)", "und z.B. Rom."]),
        ("See No. 5 and Vol. 12 now.", 13, ["See No. 5 and", "Vol. 12 now."]),
        ("It began in 2024. Then it ended.", 20, ["It began in 2024.", "Then it ended."]),
        ("மரம் ஓட. அது.", 9, ["மரம் ஓட.", "அது."]),
        ("你好，再见，好。", 4, ["你好，", "再见，", "好。"]),
        ("One.\nTwo.", 5, ["One.", "Two."]),
        # Chinese has no blanks, and its closing marks belong to the sentence before.
        ("你好。再见！？”好。", 5, ["你好。", "再见！？”", "好。"]),
    ):
        assert split_text(text, at_most(characters)) == pieces
        assert split_text(text, at_most(99)) == [" ".join(text.split())]
    # Every part counts a beginning and an end, of two characters here, and the whole but one.
    words = " ".join(["abc"] * 9)
    assert split_text(words, lambda each: [(2 + len(e.strip())) / 20 for e in each]) == [
        *(" ".join(["abc"] * 4),) * 2,
        "abc",
    ]
    # At low latency the first piece is short, but not very.
    text = "One two three four. Five six. Seven."
    assert split_text(text, at_most(99), True) == ["One two three four.", "Five six. Seven."]
    assert split_text("Yes. No. Or what? Well.", at_most(99), True)[0] == "Yes. No. Or what?"
    assert clean_text(" a\r\nb\t c \n \n\nd\n") == "a b c\nd" and clean_text(" \n") == ""
    assert clean_text("天气\n很好") == "天气很好"


def test_pieces_are_joined_without_clicks():
    ramp = torch.arange(5) / 5
    ones = Speech(torch.ones(20), 1000, torch.ones(2, CHANNELS))
    piece = torch.cat([ramp, torch.ones(10), ramp.flip(0)])
    expected = torch.cat([piece, torch.zeros(120), piece])
    two = join([ones, ones])
    torch.testing.assert_close(two.waveform, expected)
    assert two.sample_rate == 1000 and torch.equal(two.latents, torch.ones(4, CHANNELS))
    assert torch.equal(join([ones]).waveform, torch.ones(20))
    assert part(torch.ones(1), 0, 2, 1000).tolist() == [1]
    assert part(torch.ones(3), 0, 2, 1000)[0] == 0
