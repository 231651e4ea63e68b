"""`titan-tts generate --text-list`: files, what is resumed, and lists that are refused."""

import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP
from titan_tts.cli import main
from titan_tts.speak.request_lists import Request, read_requests


@pytest.fixture
def said(tmp_path, generate):
    """Arguments of a list of three texts."""
    (tmp_path / "lists").mkdir()
    # Files that a list names are next to it.
    np.save(tmp_path / "lists" / "voice.npy", np.ones((3, CHANNELS), np.float16))
    rows = [
        {"text": "one\ntwo", "speaker": "ann"},
        {"text": "two", "name": "a/b", "reference": "voice.npy"},
        {"text": "one two", "seconds": 0.4, "conditions": {"speaker": "ann"}},
    ]
    path = tmp_path / "lists" / "texts.jsonl"
    path.write_text("\n" + "\n".join(map(json.dumps, rows)) + "\n\n")
    return ["--text-list", path, "--out=new", "--speaker=bob"]


def test_each_text_of_a_list_becomes_a_file_and_is_resumed(
    generate, said, tmp_path, monkeypatch, capsys
):
    def complete(*arguments):
        assert generate(*said, *arguments) == 0
        return "all texts are complete" in capsys.readouterr().out

    # Each batch takes a second.
    clock = SimpleNamespace(perf_counter=count().__next__)
    monkeypatch.setattr("titan_tts.speak.synthesizer.time", clock)
    said.append("--format=flac")
    assert generate(*said, "--batch-size=2") == 0
    new = tmp_path / "new"
    assert [len(batch) for batch, *_ in generate.asked] == [2, 1]
    voices = {
        (one.text, one.frames == 10): (one.metadata.get("speaker"), float(one.reference.mean()))
        for batch, *_ in generate.asked
        for one in batch
    }
    # The reference of ann is 12 in every value, that of bob, who is common to all, 13.
    assert voices[("one two", False)] == ("ann", 12) and voices[("two", False)] == (None, 1)
    assert voices[("one two", True)] == ("ann", 13)
    names = {f"{name}.{kind}" for name in ("000001", "000003", "a_b") for kind in ("flac", "json")}
    assert {each.name for each in new.iterdir()} == names
    sound, rate = soundfile.read(new / "000003.flac")
    assert (rate, len(sound)) == (100, 10 * HOP)
    wanted = {"text": "one two", "seconds": 0.4, "step": 7, "weights": "raw", "seed": 0}
    about = json.loads((new / "000003.json").read_text())
    assert about | wanted == about
    seconds = sum(soundfile.info(path).frames for path in new.glob("*.flac")) / 100
    speed = f"2.00 s for {seconds:.2f} s of speech (real-time factor {2 / seconds:.3f})"
    assert f"3 texts from step 7 (raw), {speed}\n" in capsys.readouterr().out
    before = (new / "000001.flac").stat().st_mtime_ns
    (new / "a_b.flac").unlink()  # a kill between the two files
    assert not complete() and (new / "000001.flac").stat().st_mtime_ns == before and complete()
    # After more training, another checkpoint continues the list only if --step names it.
    (tmp_path / "run/checkpoint/step-8").mkdir()
    assert generate(*said) == 2 and "give its --step" in capsys.readouterr().err
    said.append("--step=7")
    assert complete() and complete("--batch-size=3")
    assert main(["generate", "./run/", *map(str, said)]) == 0
    assert "complete" in capsys.readouterr().out
    # A file is replaced only with --overwrite; a sound of somebody else has no description.
    for option in ("--text-scale=9", "--sampling.solver=heun", "--seed=5", "--timestamps=srt"):
        assert generate(*said, option) == 2, option
        assert "from another text, voice, step or command" in capsys.readouterr().err
    (new / "000001.json").unlink()
    assert generate(*said) == 2 and "000001.flac is there from another" in capsys.readouterr().err
    assert generate(*said, "--overwrite") == 0
    assert (new / "000001.flac").stat().st_mtime_ns != before
    # A kill before the new sound does not leave the old one beside the new description.
    monkeypatch.setattr("titan_tts.speak.utterance.write_sound", None)
    with pytest.raises(TypeError):
        generate(*said, "--overwrite")
    assert len([*new.glob("*.flac")]) == 2


def test_what_a_line_takes_of_the_options_and_what_changes_its_speech(tmp_path):
    for name in "vw":
        (tmp_path / f"{name}.npy").touch()
    path, conditions = tmp_path / "list", {"speaker": "bob", "language": "de"}
    common = Request("the options", speaker="ann", seconds=600.0, conditions=conditions)
    own = '"speaker": "eve", "seconds": 3, "conditions": {"language": "en"}'
    reference = '"reference": ["w.npy", "v.npy"], "reference_text": "t", "name": "n"'
    lines = f'\n{{"text": "a"}}\n{{"text": "b", {own}}}\n{{"text": "c", {reference}}}'
    path.write_text(lines, encoding="utf-8-sig")
    files = (str(tmp_path / "w.npy"), str(tmp_path / "v.npy"))
    first = replace(common, where=f"{path} line 2", text="a", id="000001")
    assert read_requests(str(path), common) == [
        first,
        Request(f"{path} line 3", "b", "000002", "eve", {"language": "en"}, seconds=3.0),
        Request(f"{path} line 4", "c", "n", "", {"language": "de"}, files, "t", 600.0),
    ]
    changes = [{}, {"text": "b"}, {"seconds": 3.0}, {"conditions": {}}, {"speaker": "x"}]
    changes += [{"reference": ("x",)}, {"reference": ("x",), "reference_text": "t"}]
    prints = {replace(first, **change).fingerprint("settings") for change in changes}
    assert len({*prints, first.fingerprint("others")}) == len(changes) + 1
    assert replace(first, where="x", id="y").fingerprint("settings") in prints


LINES = {
    "one": "is 'one', but a JSON object",
    "[" * 100_000: "JSON object",
    '{"text": 1}': "text = 1 is of a wrong type",
    '{"text": " "}': "line 2 is empty",
    '{"text": "' + 200_001 * "a" + '"}': "line 2 has 200001 characters, but at most 200000",
    '{"text": "a", "voice": "b"}': "has 'voice', but allowed are text, name, reference",
    '{"text": "a", "name": "X"}': "two lines have the name ['X']",
    '{"text": "a", "seconds": 1' + 90 * "0" + "}": "line 2: seconds = 1000000000.0",
    '{"text": "a", "seconds": 1' + 400 * "0" + "}": "but a JSON object",
    '{"text": "a", "reference": "' + 300 * "b" + '"}': "no such file",
    '{"text": "b", "speaker": "eve"}': "line 2: --speaker = eve",
    '{"text": "a", "reference": ["good.npy", 3]}': "it must be paths",
    '{"text": "a", "reference": ["good.npy", "gone.npy"]}': "gone.npy, but there is no such file",
    '{"text": "a\\ud800"}': "line 2: ",
    '{"text": "a", "reference": "good.npy", "reference_text": "\\ud800"}': "line 2: the text has",
    '{"text": "a", "reference": "wide.npy"}': "latents (frames, 8) are needed",
    '{"text": "a", "reference": "nan.npy"}': "not finite",
    '{"text": "a", "reference": "object.npy"}': "array of object",
}


def test_all_lines_are_checked_before_one_is_said(generate, tmp_path, capsys):
    valid = np.ones((3, CHANNELS), np.float16)
    for name, content in (
        ("good", valid),
        ("wide", valid[:, 1:]),
        ("nan", valid * np.nan),
        ("object", np.array([{}])),
    ):
        np.save(tmp_path / f"{name}.npy", content, allow_pickle=True)
    path = tmp_path / "texts.jsonl"
    for line, words in LINES.items():
        path.write_text('{"text": "a\u2028b", "name": "x"}\n' + line)
        assert generate("--text-list", path, "--out=new", "--speaker=bob") == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert words in error and "texts.jsonl" in error, line[:99]
    assert not (tmp_path / "new").exists()
