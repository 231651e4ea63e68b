"""`titan-tts generate` with texts from files, lists and the standard input, to files and the standard output."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from tests.helpers import served
from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP
from tests.helpers.sentences import refused
from titan_tts.cli import main
from titan_tts.speak import generate_command
from titan_tts.speak.request_lists import Request, read_requests
from torchtitan.models.dit_tts.config import manager


@pytest.fixture
def generate(tmp_path, shards, monkeypatch):
    """`titan-tts generate` of a small run, in the test's folder."""
    synthesizer = served.make_synthesizer(tmp_path, shards)
    monkeypatch.setattr(generate_command, "load_synthesizer", lambda *args, **more: synthesizer)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoint/step-7").mkdir(parents=True)
    monkeypatch.setattr(manager, "load_run_config", lambda *args: synthesizer.run.config)

    def command(*arguments):
        return main(["generate", "run", *map(str, arguments)])

    command.synthesizer = synthesizer
    return command


@pytest.fixture
def lines(tmp_path):
    np.save(tmp_path / "voice.npy", np.ones((3, CHANNELS), np.float16))
    rows = [
        {"text": "one\ntwo", "speaker": "ann"},
        {"text": "two", "name": "a/b", "reference": "voice.npy"},
        {"text": "one two", "seconds": 0.4, "conditions": {"speaker": "bob"}},
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_a_list_becomes_a_file_each(generate, lines, tmp_path, capsys):
    said = ["--text-list", lines, "--out=new", "--speaker=bob", "--format=flac"]
    assert generate(*said) == 0
    new = tmp_path / "new"
    assert sorted(each.name for each in new.iterdir()) == [
        *("000001.flac", "000001.json", "000003.flac", "000003.json", "a_b.flac", "a_b.json")
    ]
    sound, rate = soundfile.read(new / "000003.flac")
    assert (rate, len(sound)) == (100, 10 * HOP)
    assert json.loads((new / "000001.json").read_text())["text"] == "one two"
    assert "3 texts from step 7" in capsys.readouterr().out
    # What is there is not replaced unless it is asked for.
    (new / "a_b.flac").unlink()
    before = (new / "000001.flac").stat().st_mtime_ns
    assert generate(*said) == 2 and "new/000001.flac exists" in capsys.readouterr().err
    assert generate(*said, "--resume") == 0 and "1 texts" in capsys.readouterr().out
    assert (new / "000001.flac").stat().st_mtime_ns == before
    assert generate(*said, "--resume") == 0 and "all texts are there" in capsys.readouterr().out
    assert generate(*said, "--resume", "--seed=5") == 2
    assert "of another text, voice, step or command" in capsys.readouterr().err
    # Training went on: what was begun is not ended by another checkpoint unless it is said.
    (tmp_path / "run/checkpoint/step-8").mkdir()
    assert generate(*said, "--resume") == 2 and "give its --step" in capsys.readouterr().err
    said.append("--step=7")
    assert generate(*said, "--resume") == 0 and "all texts are there" in capsys.readouterr().out
    (new / "a_b.flac").unlink()  # a kill between the two files
    assert generate(*said, "--resume") == 0 and "1 texts" in capsys.readouterr().out
    assert generate(*said, "--overwrite") == 0
    assert (new / "000001.flac").stat().st_mtime_ns != before


def test_what_a_list_left_is_done_only_if_it_is_whole_and_said_alike(
    generate, lines, tmp_path, capsys
):
    said = ["--text-list", lines, "--out=new", "--speaker=bob"]
    assert generate(*said) == 0
    capsys.readouterr()
    sound = tmp_path / "new/000001.wav"
    whole = sound.read_bytes()
    for cut in (whole[:-2], whole[:5], b""):  # as a full disk or a broken copy leaves it
        sound.write_bytes(cut)
        assert generate(*said, "--resume") == 0 and "1 texts" in capsys.readouterr().out
        assert sound.read_bytes() == whole
    other = ("--text-scale=9", "--speaker-scale=9", "--sampling-steps=9", "--sampling.solver=heun")
    for option in (*other, "--weights=raw", "--duration-scale=2"):
        assert generate(*said, "--resume", option) == 2, option
        assert "of another text, voice, step or command" in capsys.readouterr().err
    assert sound.read_bytes() == whole


def test_processes_divide_a_list(generate, lines, tmp_path, monkeypatch, capsys):
    """What each says is what one process says."""
    generate("--text-list", lines, "--out=one", "--speaker=bob")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, count in ((0, 2), (1, 1)):
        monkeypatch.setenv("RANK", str(rank))
        assert generate("--text-list", lines, "--out=two", "--speaker=bob") == 0
        assert f"{count} texts" in capsys.readouterr().out.splitlines()[-1]
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert generate("--text=one") == 2 and "give --text-list" in capsys.readouterr().err
    assert generate("--text-list=-", "--out=x") == 2
    assert "need a file" in capsys.readouterr().err


def test_a_voice_is_of_one_reference_or_nobodys(generate, lines, monkeypatch):
    voices = []

    def requests(utterances):
        voices.extend(utterances)
        return type(generate.synthesizer).requests(generate.synthesizer, utterances)

    monkeypatch.setattr(generate.synthesizer, "requests", requests)
    assert generate("--text-list", lines, "--out=new", "--speaker=bob") == 0
    assert [u.voice.speaker for u in voices] == ["ann", "", "bob"]
    assert [u.conditions for u in voices] == [{"speaker": "ann"}, {}, {"speaker": "bob"}]
    assert (voices[1].voice.reference == 1).all()
    voices.clear()
    assert generate("--text=one", "--out=a.wav") == 0
    assert voices[0].voice.reference is None


def test_text_comes_and_sound_goes_through_pipes(generate, tmp_path, monkeypatch, capsysbinary):
    generate.synthesizer.run.config.data.max_frames = 4
    text = "One two one.\nTwo one two.\n\nOne one. Two."
    stdin = SimpleNamespace(buffer=io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert generate("--text-file=-", "--out=-", "--speaker=ann") == 0
    out, err = capsysbinary.readouterr()
    sound, rate = soundfile.read(io.BytesIO(out))  # its header has the length
    assert b"first sound after" in err and b"pieces" in err
    (tmp_path / "text.txt").write_text(text)
    for kind in ("wav", "pcm", "mp3", "ogg"):
        said = ["--text-file=text.txt", "--out=-", "--speaker=ann", f"--format={kind}"]
        assert generate(*said) == 0
        content = capsysbinary.readouterr().out
        if kind == "pcm":
            assert content == out[44:]
        else:
            again, its_rate = soundfile.read(io.BytesIO(content))
            assert len(again) / its_rate == pytest.approx(len(sound) / rate, abs=0.2)
    assert generate("--text-file=text.txt", "--out=a.ogg", "--speaker=ann") == 0
    assert soundfile.info("a.ogg").subtype == "OPUS"


@pytest.mark.parametrize(
    "line, words",
    [
        ("one", ["line 2", "'one'", "JSON object"]),
        ("{}", ['with "text"']),
        ('{"text": 1}', ["text = 1 is of a wrong type"]),
        ('{"text": " "}', ["line 2 is empty"]),
        ('{"text": "a", "voice": "b"}', ["'voice'", "reference_text"]),
        ('{"text": "a", "seconds": true}', ["seconds = True"]),
        ('{"text": "a", "seconds": -1}', ["seconds = -1"]),
        ('{"text": "a", "reference": "b.wav"}', ["b.wav, but there is no such file"]),
        ('{"text": "a", "reference_text": "b"}', ["without the reference"]),
        ('{"text": "a", "name": "X"}', ["two lines have the name 'X'"]),
        ('{"text": "a", "seconds": 1' + 400 * "0" + "}", ["line 2: seconds = 1e+09"]),
        ('{"text": "a", "reference": "' + 300 * "b" + '"}', ["no such file"]),
        ("[" * 100_000, ["JSON object"]),
    ],
)
def test_wrong_lines(tmp_path, line, words):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a", "name": "x"}\n' + line)
    refused(lambda: read_requests(str(path), Request("", "")), "texts.jsonl", *words)


def test_all_lines_are_checked_before_one_is_said(generate, tmp_path, capsys):
    np.save(tmp_path / "v.npy", np.ones((3, CHANNELS), np.float16))
    for row, words in (
        ({"text": "b", "speaker": "eve"}, "line 2: --speaker = eve"),
        ({"text": "a\ud800"}, "line 2: "),
        ({"text": "a", "reference": "v.npy", "reference_text": "\ud800"}, "line 2: the text has"),
    ):
        path = tmp_path / "texts.jsonl"
        path.write_text('{"text": "a\u2028b"}\n' + json.dumps(row))
        assert generate("--text-list", path, "--out=new", "--speaker=bob") == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_reference_of_latents(generate, tmp_path, capsys):
    for content, words in (
        (np.ones((3, CHANNELS + 1), np.float32), "latents (frames, 8) are needed"),
        (np.full((3, CHANNELS), np.nan, np.float32), "not finite"),
        (np.array([{}]), "is no array"),
    ):
        np.save(tmp_path / "voice.npy", content, allow_pickle=True)
        assert generate("--text=one", "--out=a.wav", "--reference=voice.npy") == 2
        assert words in capsys.readouterr().err
