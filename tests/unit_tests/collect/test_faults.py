"""What fails, is killed or is damaged: nothing is lost, half done or done twice, and the sentence names it."""

import json
import os
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.helpers.collecting import COUNT, complete, read_rows, seconds, tree
from tests.helpers.sentences import refused
from titan_tts import cli
from titan_tts.collect import worker
from titan_tts.collect.collection import write_collection
from titan_tts.collect.folder import read_recording
from tools.harness.stand_in_analyzer import RATE, StandIn
from torchtitan.models.dit_tts.errors import InputError


def test_recordings_that_fail_or_have_no_segment_are_listed(
    source, output, collect, capsys, monkeypatch
):
    (source / "broken.mp3").write_bytes(b"ID3 no audio")
    for name, samples in (("empty", 0), ("one", 1), ("short", RATE // 2)):
        soundfile.write(source / f"{name}.wav", np.zeros(samples), RATE)
    calls, decode = [], worker.decode
    monkeypatch.setattr(worker, "decode", lambda path: calls.append(path) or decode(path))
    monkeypatch.setattr(worker, "MAX_SECONDS", 3.5)
    too_long = sum(seconds(path) > 3 for path in source.glob("0*.wav"))
    assert collect(source, output) == 1
    sizes = [os.path.getsize(path) for path in calls[:10]]
    assert sizes == sorted(sizes, reverse=True)  # the shortest fill the gaps at the end
    said = " ".join(capsys.readouterr().out.split())
    assert f"recordings {8 - too_long} of 10 without a segment 2 hours in" in said
    assert "broken.mp3: the audio cannot be decoded" in said
    assert "0.0 hours, but 27 are the most" in said and 0 < too_long < COUNT
    assert "empty.wav: the audio has 0 samples" in said and f"failed {2 + too_long} failed" in said
    assert "broken.mp3" in (output / "report.html").read_text()
    assert len(calls) == 8 - too_long + 3 * (2 + too_long)
    monkeypatch.undo()
    (source / "broken.mp3").unlink()  # what is gone and was never complete is no recording
    assert collect(source, output) == 1 and len(complete(output)) == 8
    assert "recordings 8 of 9" in " ".join(capsys.readouterr().out.split())


def test_an_error_that_is_not_the_recordings_is_tried_again(source, output, collect, monkeypatch):
    failing = iter(
        [RuntimeError("CUDA error"), None, MemoryError(), InputError("a plug-in failed")]
    )
    analyze = StandIn.analyze

    def fail_sometimes(self, *arguments):
        if (error := next(failing, None)) is not None:
            raise error
        return analyze(self, *arguments)

    monkeypatch.setattr(StandIn, "analyze", fail_sometimes)
    assert collect(source, output) == 0
    assert len(complete(output)) == COUNT


@pytest.mark.parametrize("done", [0, 1])
def test_a_command_that_is_killed_leaves_nothing_half_done(
    source, output, collect, monkeypatch, done
):
    class Killed(BaseException):
        pass

    analyzed, write, analyze = [], worker.write_recording, StandIn.analyze

    def die(*arguments):
        if done:
            write(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_recording", die)
        with pytest.raises(Killed):
            collect(source, output)
    assert len(complete(output)) == done
    assert not (output / "collection.jsonl").exists()
    (output / "partial/left").mkdir(parents=True)
    monkeypatch.setattr(StandIn, "analyze", lambda *given: analyzed.append(1) or analyze(*given))
    assert collect(source, output) == 0
    assert len(analyzed) == COUNT - done
    whole = output.with_name("whole")
    collect(source, whole)
    assert tree(whole / "files") == tree(output / "files")
    assert (whole / "collection.jsonl").read_bytes() == (output / "collection.jsonl").read_bytes()
    assert not (output / "partial").exists()


def test_a_disk_that_is_full_is_no_fault_of_a_recording(
    source, output, collect, monkeypatch, capsys
):
    write, limits = worker.write_recording, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_recording", on_a_full_disk)
        assert collect(source, output) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not complete(output) and not list((output / "partial").glob("*"))
    assert collect(source, output) == 0


def test_what_is_missing_in_files_is_made_again(source, output, collect):
    collect(source, output)
    files, rows = tree(output / "files"), read_rows(output)
    shutil.rmtree(next((output / "files").iterdir()))
    (output / "sources.jsonl").unlink()
    assert collect(source, output) == 0
    assert (tree(output / "files"), read_rows(output)) == (files, rows)


KINDS = "shuffle drop double audio cut nan swap agreement text snr_db clipped stop id".split()


def damage(folder: Path, kind: str, rng: random.Random) -> None:
    """Does something to a recording's folder that a bad disk or a hand could do."""
    path = folder / "segments.jsonl"
    lines = path.read_text().splitlines()
    one, other = rng.sample(range(len(lines)), 2)
    records = [json.loads(line) for line in lines]
    audio = folder / f"{records[one]['id']}.flac"
    wrong = {"agreement": "x", "text": 5, "snr_db": None, "clipped": True, "stop": 10**400}
    if kind == "shuffle":
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == "drop":
        del lines[one]
    elif kind == "double":
        lines.insert(other, lines[one])
    elif kind == "audio":
        audio.unlink()
    elif kind == "cut":
        os.truncate(folder / rng.choice([audio.name, "embeddings.npy", "recording.json"]), 9)
    elif kind == "nan":
        np.save(folder / "embeddings.npy", np.full((len(lines), 4), np.nan, np.float32))
    else:
        if kind == "swap":  # a text with the times of one and the audio of another
            records[one]["audio"] = records[other]["audio"]
        elif kind == "id":
            del records[one][rng.choice(sorted(records[one].keys() - {"source", "speaker"}))]
        else:
            records[one][kind] = wrong[kind]
        lines = [json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")


def test_a_damaged_folder_is_refused_whatever_the_damage(source, output, collect):
    collect(source, output)
    folders = [f for f in (output / "files").iterdir() if len(list(f.glob("*.flac"))) > 1]
    rng = random.Random(0)
    for kind in KINDS * 3:
        folder = rng.choice(folders)
        kept = tree(folder)
        damage(folder, kind, rng)
        refused(lambda: read_recording(folder, folder.name), folder.name)
        refused(lambda: write_collection(output), folder.name)
        for name, content in kept.items():
            (folder / name).write_bytes(content)
    write_collection(output)
    other = np.load(folders[0] / "embeddings.npy")
    np.save(folders[0] / "embeddings.npy", np.pad(other, [(0, 0), (0, 1)]))
    refused(lambda: write_collection(output), "embeddings of another size")
    np.save(folders[0] / "embeddings.npy", other)
    (output / "speakers.json").write_text('{"a": 1')
    refused(lambda: write_collection(output), "speakers.json", "new names")


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../elsewhere": "a.wav"}},
        {"files": {"0" * 16: 5}},
        {"settings": {"speaker_threshold": "high"}},
    ],
)
def test_names_of_a_strangers_folder_reach_no_path(source, output, collect, capsys, change):
    collect(source, output)
    record = json.loads((output / "collect.json").read_text())
    (output / "collect.json").write_text(json.dumps(record | change))
    refused(lambda: write_collection(output), "collect.json")
    capsys.readouterr()
    for command in (["collect", str(source)], ["annotate"]):
        assert cli.main([*command, str(output)]) == 2
        assert "collect.json" in capsys.readouterr().err
