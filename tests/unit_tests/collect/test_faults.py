"""A failure, a missing or a damaged file is named in one sentence, and nothing is lost, half done or done twice."""

import json
import os
import resource
import shutil

import numpy as np
import soundfile

from tests.helpers.collecting import COUNT, complete, read_rows, seconds, tree
from tests.helpers.sentences import refused
from titan_tts.collect import worker
from titan_tts.collect.collection import write_collection
from tools.harness.stand_in_analyzer import RATE


def test_recordings_that_fail_or_have_no_segment_are_listed(
    source, output, collect, capsys, monkeypatch
):
    (source / "broken.mp3").write_bytes(b"ID3 no audio")
    for name, samples in (("empty", 0), ("one", 1), ("short", RATE // 2)):
        soundfile.write(source / f"{name}.wav", np.zeros(samples), RATE)
    calls, decode = [], worker.decode
    too_long = sum(seconds(path) > 3 for path in source.glob("0*.wav"))
    with monkeypatch.context() as patch:
        counted = lambda path, longest: calls.append(path) or decode(path, longest=longest)  # noqa: E731
        patch.setattr(worker, "decode", counted)
        patch.setattr(worker, "MAX_SECONDS", 3.5)
        assert collect(source, output) == 1
    sizes = [os.path.getsize(path) for path in calls[:10]]
    assert sizes == sorted(sizes, reverse=True)  # the shortest fill the gaps at the end
    said = " ".join(capsys.readouterr().out.split())
    assert f"recordings {8 - too_long} of 10 without a segment 2 hours in" in said
    assert "broken.mp3: the file is text, not audio" in said
    assert "0.0 hours, but 27 are the most" in said and 0 < too_long < COUNT
    assert "empty.wav: the audio has 0 samples" in said and f"failed {2 + too_long} failed" in said
    assert "broken.mp3" in (output / "report.html").read_text()
    assert len(calls) == 8 - too_long + 3 * (2 + too_long)
    (source / "broken.mp3").unlink()  # what is gone and was never complete is no recording
    assert collect(source, output) == 1 and len(complete(output)) == 8
    assert "recordings 8 of 9" in " ".join(capsys.readouterr().out.split())


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
    (output / "partial/left").mkdir(parents=True)  # by a worker that was killed
    assert collect(source, output) == 0
    assert (tree(output / "files"), read_rows(output)) == (files, rows)
    assert not (output / "partial").exists()


ROWS = {  # what a hand or a bad disk could do to the rows of a recording
    "other times": lambda rows: rows.reverse(),
    "a row too few": lambda rows: rows.pop(),
    "a row twice": lambda rows: rows.append(rows[0]),
    "another's audio": lambda rows: rows[0].update(audio=rows[1]["audio"]),
    "no id": lambda rows: rows[0].pop("id"),
    "no figure": lambda rows: rows[1].pop("loudness"),
    "a pitch of words": lambda rows: rows[0].update(pitch="low"),
    "words": lambda rows: rows[0].update(agreement="x"),
    "no text": lambda rows: rows[0].update(text=5),
    "null": lambda rows: rows[0].update(snr_db=None),
    "a truth": lambda rows: rows[0].update(clipped=True),
    "endless": lambda rows: rows[1].update(stop=10**400),
}
FILES = {
    "no audio": lambda folder: next(folder.glob("*.flac")).unlink(),
    "cut audio": lambda folder: os.truncate(next(folder.glob("*.flac")), 9),
    "cut embeddings": lambda folder: os.truncate(folder / "embeddings.npy", 9),
    "cut record": lambda folder: os.truncate(folder / "recording.json", 9),
    "no numbers": lambda folder: np.save(folder / "embeddings.npy", np.full((2, 4), np.nan)),
}


def test_a_damaged_folder_is_refused_whatever_the_damage(source, output, collect):
    soundfile.write(source / "two.wav", np.full(2 * RATE, 0.1), RATE)
    collect(source / "two.wav", output)
    collect(source / "000.wav", output)
    [folder] = [
        each for each in (output / "files").iterdir() if len(list(each.glob("*.flac"))) == 2
    ]
    kept, listed = tree(folder), folder / "segments.jsonl"
    for damage in [*ROWS.values(), *FILES.values()]:
        rows = [json.loads(line) for line in listed.read_text().splitlines()]
        if damage in FILES.values():
            damage(folder)
        else:
            damage(rows)
            listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
        refused(lambda: write_collection(output), folder.name)
        for name, content in kept.items():
            (folder / name).write_bytes(content)
    write_collection(output)
    np.save(folder / "embeddings.npy", np.ones((2, 5)))
    refused(lambda: write_collection(output), "embeddings of another size")
    (folder / "embeddings.npy").write_bytes(kept["embeddings.npy"])
    (output / "speakers.json").write_text('{"a": 1')
    refused(lambda: write_collection(output), "speakers.json", "new names")
