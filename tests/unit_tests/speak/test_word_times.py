"""When words are said: against speech whose times are known; and the files that tell them."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from titan_tts.speak.utterance import Speech
from titan_tts.speak.word_times import Word, WordAligner, cues, subtitles
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.text.aligner import Aligner, CharacterLengths

DIGITS = Path(__file__).parents[3] / "assets/spoken_digits/spoken_digits.tar"
SYMBOLS = " -abcdefghijk\ue000"
SOUNDS = np.random.default_rng(1).standard_normal((len(SYMBOLS) + 2, 40)).astype(np.float32)
NO_LENGTHS = CharacterLengths(np.zeros(1, np.uint64), np.zeros(1, np.float32))
READ = {"£9": "ga hi", "the": "dea", "the ab": "dei ab"}
"""what is said otherwise than it is written; "the" by itself otherwise than in its text"""


def read(text):
    for written, said in reversed(READ.items()):
        text = text.replace(written, said)
    return text.replace("(k)", "\ue000")


def speech(said, frames, rate=100):
    """The sound of characters and the silences around them, 40 ms a frame; it speaks through its latents."""
    states = np.repeat([0, *(2 + SYMBOLS.index(c) for c in said), 0], frames)
    return Speech(torch.zeros(4 * len(states)), rate, torch.from_numpy(SOUNDS[states]))


def found(words):
    return [(word.text, round(word.begin, 2), round(word.end, 2)) for word in words]


def test_words_of_pieces_are_found_however_they_are_read():
    variances = np.full(SOUNDS.shape, 0.3, np.float32)
    aligner = Aligner(SYMBOLS, SOUNDS, variances, NO_LENGTHS)
    ours = WordAligner(aligner, read, AddedTokens(["(k)"]))
    texts = ["the ab £9 - bc", "(k) - ef"]
    assert [read(text) for text in texts] == ["dei ab ga hi - bc", "\ue000 - ef"]
    # Silences of 5 and 2 frames, sounds of 2, the blank behind "ab" long, that behind "dei" short.
    first = speech("dei ab ga hi - bc", [5, 2, 2, 2, 1, 2, 2, 5, 2, 2, 1, 2, 2, 1, 1, 1, 2, 2, 2])
    second = speech("\ue000 - ef", [1, 6, 1, 1, 1, 2, 2, 1])
    assert len(first.waveform) == 156
    begin = 1.56 + 0.12  # and the pause between pieces
    assert found(ours.times(texts, [first, second])) == [
        ("the", 0.2, 0.46),
        ("ab", 0.46, 0.64),
        ("£9 -", 0.84, 1.2),
        ("bc", 1.32, 1.48),
        ("- ef", round(begin + 0.4, 2), round(begin + 0.56, 2)),
    ]
    assert ours.times(["-"], [first]) == ours.times([], []) == []


def test_the_times_of_a_model_that_has_no_aligner(synthesizer):
    """Digits that were spoken one by one, behind each other: the base voice's aligner hears where they are."""
    alone = {}
    with tarfile.open(DIGITS) as tar:
        for name in sorted(each for each in tar.getnames() if each.endswith(".json")):
            about = json.load(tar.extractfile(name))
            if about["speaker"] in ("slt", "awb") and " " not in about["text"]:
                sound = io.BytesIO(tar.extractfile(name.replace(".json", ".opus")).read())
                alone[about["text"]], rate = soundfile.read(sound, dtype="float32")
    assert len(alone) == 10 and rate == 16_000
    silence, sounds, edges, end = np.zeros(4_800, np.float32), [], [], 0.0
    for samples in alone.values():
        sounds += [silence, samples]
        begin, end = end + 0.3, end + 0.3 + len(samples) / rate
        edges += [begin + 0.05, end - 0.05]  # the corpus leaves 50 ms around the words
    said = Speech(torch.from_numpy(np.concatenate(sounds)), rate, torch.zeros(1, 8))
    text = ", ".join(alone)
    words = synthesizer.word_times([text], [said])
    assert [word.text for word in words] == text.split()
    errors = np.abs(np.array([time for w in words for time in (w.begin, w.end)]) - edges)
    assert np.median(errors) < 0.04 and errors.max() < 0.25


def words_of(text, seconds=0.3, pauses=()):
    """Words of so many seconds each, with a pause of 0.7 s behind some."""
    words, begin = [], 0.1
    for word in text.split():
        words.append(Word(word, begin, begin + seconds))
        begin += seconds + (0.7 if word in pauses else 0)
    return words


@pytest.mark.parametrize(
    "text, pauses, lines",
    [
        ("", (), []),
        ("Mr. Fox ran. It rained!", (), ["Mr. Fox ran.", "It rained!"]),
        ("he ran and fell", ("ran",), ["he ran", "and fell"]),
        ("a" * 60 + " b", (), ["a" * 60, "b"]),
        ("one two three four five six seven eight nine ten", (), ["one two three four five", "six seven eight nine ten"]),
    ],
)  # fmt: skip
def test_a_cue_is_a_line_of_one_sentence(text, pauses, lines):
    found = cues(words_of(text, pauses=pauses))
    assert [" ".join(word.text for word in cue) for cue in found] == lines


def test_subtitles_have_the_clock_of_their_kind():
    words = [Word("A<b", 3599.5, 3600.25), Word("&", 3600.25, 3600.25)]
    words += [Word("cat.", 3600.25, 3601.0), Word("So", 3601.2, 3601.6)]
    words += [Word("on.", 3603.0, 3603.9996)]
    assert subtitles(words, "srt") == (
        "1\n00:59:59,500 --> 01:00:01,200\nA<b & cat.\n\n"
        "2\n01:00:01,200 --> 01:00:01,600\nSo\n\n"
        "3\n01:00:03,000 --> 01:00:04,000\non.\n"
    )
    first, *_, last = subtitles(words, "vtt").split("\n\n")[1:]
    assert first == "00:59:59.500 --> 01:00:01.200\nA&lt;b <01:00:00.250>&amp; cat."
    assert last == "01:00:03.000 --> 01:00:04.000\non.\n"
    assert subtitles([], "srt") == "" and subtitles([], "vtt") == "WEBVTT\n"


KINDS = ["--timestamps=json", "--timestamps=srt", "--timestamps=vtt"]


def test_generate_writes_them_beside_the_sound(generate, tmp_path, capsys):
    assert generate("--text=one two. One.", "--out=said.wav", "--speaker=bob", *KINDS) == 0
    rows = [{"text": "one two", "name": "a.b"}, {"text": "two"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert generate("--text-list=list.jsonl", "--out=new", "--speaker=bob", *KINDS) == 0
    for name, text in (("said", "one two. One."), ("new/a.b", "one two"), ("new/000002", "two")):
        about = json.loads(Path(f"{name}.json").read_text())
        times = [each[key] for each in about["words"] for key in ("start", "end")]
        assert " ".join(each["word"] for each in about["words"]) == text
        assert times == sorted(times) and 0 <= times[0] < times[-1] <= about["seconds"]
        assert text.split(". ")[0] in Path(f"{name}.srt").read_text()
        assert Path(f"{name}.vtt").read_text().startswith("WEBVTT\n\n00:00:0")
    assert generate("--text=one", "--out=-", "--timestamps=srt") == 2
    assert "--timestamps writes files named as the sound" in capsys.readouterr().err
