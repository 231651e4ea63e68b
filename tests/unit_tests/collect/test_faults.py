"""What fails, is killed or is damaged: nothing is lost, half done or done twice, and the sentence names it."""

import json
import os
import random
import resource
import shutil
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import tqdm

from tests.helpers.collecting import COUNT, analyzed_jobs, queue_of, read_rows, seconds, tree
from tests.helpers.sentences import refused
from titan_tts import cli
from titan_tts.collect import run_workers, worker
from titan_tts.collect.collect_command import Options, _work
from titan_tts.collect.collection import write_collection
from titan_tts.collect.folder import read_recording
from titan_tts.collect.queue import Queue
from tools.harness import stand_in_analyzer
from tools.harness.stand_in_analyzer import RATE, StandIn
from torchtitan.models.dit_tts.errors import InputError


def test_a_recording_that_fails_is_listed_and_may_be_tried_again(
    source, output, collect, capsys, monkeypatch
):
    (source / "broken.mp3").write_bytes(b"ID3 no audio")
    assert collect(source, output, "--attempts", "2") == 1
    said = capsys.readouterr().out
    assert (
        "recordings 6 of 7" in " ".join(said.split())
        and "broken.mp3: the audio cannot be decoded" in said
    )
    assert "broken.mp3" in (output / "report.html").read_text()
    calls = []
    decode = worker.decode
    monkeypatch.setattr(worker, "decode", lambda path: calls.append(path) or decode(path))
    assert collect(source, output) == 1 and calls == []
    assert collect(source, output, "--retry-dead", "--attempts", "2") == 1 and len(calls) == 2


def test_an_error_that_is_not_the_recordings_ends_the_process_and_not_the_job(
    source, output, collect, monkeypatch
):
    failing = iter(
        [RuntimeError("CUDA error"), None, MemoryError(), InputError("a plug-in failed")]
    )
    analyze = StandIn.analyze

    def fail_sometimes(self, *arguments):
        if (error := next(failing, None)) is not None:
            raise error
        return analyze(self, *arguments)

    monkeypatch.setattr(StandIn, "analyze", fail_sometimes)
    opened = []
    monkeypatch.setattr(stand_in_analyzer, "stand_in", lambda *a: opened.append(a) or StandIn(0))
    assert collect(source, output) == 0
    assert len(opened) == 4  # each failure ends a process
    assert queue_of(output).counts()["done"] == COUNT


@pytest.mark.parametrize("when", ["analyzed", "renamed"])
def test_a_worker_that_is_killed_leaves_nothing_half_done(
    source, output, collect, monkeypatch, when
):
    class Killed(BaseException):
        pass

    def die(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        if when == "analyzed":
            patch.setattr(worker, "write_recording", die)
        else:
            patch.setattr(Queue, "done", die)
        with pytest.raises(Killed):
            collect(source, output)
    complete = [path.name for path in (output / "files").glob("*")]
    assert len(complete) == (when == "renamed")
    assert not (output / "collection.jsonl").exists()
    assert collect(source, output) == 0
    analyzed = analyzed_jobs(output)
    assert len(analyzed) == COUNT - len(complete) and not analyzed & set(complete)
    whole = output.with_name("whole")
    collect(source, whole)
    assert tree(whole / "files") == tree(output / "files")
    assert (whole / "collection.jsonl").read_bytes() == (output / "collection.jsonl").read_bytes()
    assert not list((output / "partial").glob("*"))


def test_what_kills_the_command_again_and_again_is_left_out(source, output, collect, monkeypatch):
    class Killed(BaseException):
        pass

    analyze, largest = StandIn.analyze, max(map(seconds, source.glob("*.wav")))

    def die_of_the_largest(self, samples, *others):
        if len(samples) // RATE == largest:
            raise Killed
        return analyze(self, samples, *others)

    monkeypatch.setattr(StandIn, "analyze", die_of_the_largest)
    poisonous = sum(seconds(path) == largest for path in source.glob("*.wav"))
    for _ in range(2 * poisonous):
        with pytest.raises(Killed):
            collect(source, output, "--attempts", "2")
    assert collect(source, output, "--attempts", "2") == 1
    assert queue_of(output).counts()["dead"] == poisonous
    assert queue_of(output).counts()["done"] == COUNT - poisonous


def test_a_job_that_is_dead_and_has_its_folder_is_done(source, output, collect):
    collect(source, output)
    queue_of(output).move([next(iter(queue_of(output).jobs()))], "done", "dead")
    assert collect(source, output) == 0 and queue_of(output).counts()["done"] == COUNT


@pytest.mark.parametrize("how", ["full", "silently"])
def test_a_disk_that_fails_is_no_fault_of_a_recording(
    source, output, collect, monkeypatch, capsys, how
):
    write, limits = worker.write_recording, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        if how == "full":
            patch.setattr(worker, "write_recording", on_a_full_disk)
        else:
            patch.setattr(Path, "write_bytes", lambda path, content: path.touch())
        for _ in range(3):
            assert collect(source, output, "--attempts", "1") == 2
            said = capsys.readouterr().err
            assert "cannot be written" in said and "free space" in said
            assert not list((output / "partial").glob("*"))  # the queue needs its space
    assert queue_of(output).counts()["pending"] == COUNT
    assert collect(source, output) == 0


def test_recordings_without_a_segment_are_counted(source, output, collect, capsys):
    for name, samples in (("empty", 0), ("one", 1), ("short", RATE // 2)):
        soundfile.write(source / f"{name}.wav", np.zeros(samples), RATE)
    assert collect(source, output) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "recordings 8 of 9 without a segment 2 hours in" in said
    assert "failed 1 failed (--retry-dead tries again) empty.wav: the audio has 0 samples" in said


def test_a_recording_that_is_too_long_fails_alone(source, output, collect, monkeypatch, capsys):
    monkeypatch.setattr(worker, "MAX_SECONDS", 3.5)
    assert collect(source, output) == 1
    assert "0.0 hours, but 27 are the most" in capsys.readouterr().out
    too_long = sum(seconds(path) > 3 for path in source.glob("*.wav"))
    assert 0 < queue_of(output).counts()["dead"] == too_long < COUNT
    assert queue_of(output).counts()["done"] == COUNT - too_long


def test_a_worker_that_lost_its_claim_writes_nothing(source, output, collect, monkeypatch):
    analyze, late = StandIn.analyze, []

    def be_overtaken(self, *arguments):
        if not late:
            late.append(1)
            other = queue_of(output)
            other.release_claims("worker")
            claim = other.claim("other", 3600)
            other.done(claim, 0.0, {})
        return analyze(self, *arguments)

    monkeypatch.setattr(StandIn, "analyze", be_overtaken)
    collect(source, output)
    # The one that was overtaken has its folder all the same: both would make the same.
    assert queue_of(output).counts()["done"] == COUNT and len(analyzed_jobs(output)) == COUNT - 1
    assert len(read_rows(output)) == sum(seconds(path) for path in source.glob("*.wav"))


def test_what_is_missing_in_files_is_made_again(source, output, collect):
    collect(source, output)
    files, rows = tree(output / "files"), read_rows(output)
    shutil.rmtree(next((output / "files").iterdir()))
    (output / "queue.sqlite").unlink()
    assert collect(source, output) == 0
    assert (tree(output / "files"), read_rows(output)) == (files, rows)


def run_workers_that_end(monkeypatch, status, messages, done=()):
    """Runs workers that end with this status one after the other and say these messages; `done`: jobs so far."""
    said, counts = iter(messages), iter([0, *done])

    def started(job, device, count):
        errors, theirs = Pipe(duplex=False)
        if message := next(said, ""):
            theirs.send(message)
        theirs.close()
        process = SimpleNamespace(exitcode=status, terminate=int, join=int)
        return {"w": run_workers._Worker(process, errors, device)}

    monkeypatch.setattr(run_workers, "_started", started)
    monkeypatch.setattr(run_workers, "_POLL_SECONDS", 0)
    monkeypatch.setattr(run_workers, "interrupt_on_signals", lambda: None)
    queue = SimpleNamespace(
        fail_claims=lambda *a: status == run_workers._EXIT_AGAIN,
        release_claims=lambda name: None,
        counts=lambda: {"done": next(counts, 0)},
    )
    run_workers.run_here(None, ["cpu"], 1, queue, lambda: None)


def test_a_worker_that_ends_with_status_2_and_says_nothing_is_replaced(monkeypatch):
    run = lambda: run_workers_that_end(monkeypatch, 2, [])  # noqa: E731
    refused(run, "workers end before they have a job", "status 2")


@pytest.mark.parametrize(
    ("messages", "done", "count"),
    [
        (["a bug"] * 9, [], 3),
        (["of memory", "a bug", "of memory", "a bug", "a bug", "a bug"], [], 6),
        (["a bug"] * 5, [1, 1, 0], 5),  # others of its recordings were done
    ],
)
def test_an_analysis_that_always_fails_ends_the_command_soon(
    monkeypatch, capsys, messages, done, count
):
    taken = []
    heard = (taken.append(each) or each for each in messages)
    refused(
        lambda: run_workers_that_end(monkeypatch, run_workers._EXIT_AGAIN, heard, done),
        "fails for each recording alike (a bug)",
    )
    assert len(taken) == count
    assert capsys.readouterr().out.count("a bug\n") == 1  # said when it first happens


def test_embeddings_of_an_analyzer_that_tell_nothing_end_the_command(
    source, output, collect, monkeypatch, capsys
):
    analyze = StandIn.analyze
    for wrong in (np.array([1, np.nan, 0, 0]), np.ones(3)):

        def spoil(self, *arguments):
            found = analyze(self, *arguments)
            found[-1].embedding = wrong
            return found

        monkeypatch.setattr(StandIn, "analyze", spoil)
        assert collect(source, output) == 2
        assert "embeddings that are not finite, or of several sizes" in capsys.readouterr().err
    monkeypatch.undo()


def damages(folder: Path, rng: random.Random) -> str:
    """Does something to a recording's folder that a bad disk or a hand could do."""
    path = folder / "segments.jsonl"
    lines, kind = (
        path.read_text().splitlines(),
        rng.choice(
            ["shuffle", "drop", "double", "audio", "swap", "key", "cut", "half", "value", "nan"]
        ),
    )
    one, other = rng.sample(range(len(lines)), 2)
    records = [json.loads(line) for line in lines]
    if kind == "shuffle":
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == "drop":
        del lines[one]
    elif kind == "double":
        lines.insert(other, lines[one])
    elif kind == "audio":
        (folder / f"{records[one]['id']}.flac").unlink()
    elif kind == "cut":
        names = f"{records[one]['id']}.flac", "embeddings.npy", "recording.json"
        os.truncate(folder / rng.choice(names), 9)
    elif kind == "half":  # whose header still tells the whole length
        audio = folder / f"{records[one]['id']}.flac"
        os.truncate(audio, audio.stat().st_size // 2)
    elif kind == "nan":
        np.save(folder / "embeddings.npy", np.full((len(lines), 4), np.nan, np.float32))
    elif kind == "value":
        wrong = {"agreement": "x", "text": 5, "snr_db": None, "clipped": True, "stop": 10**400}
        name = rng.choice(sorted(wrong))
        records[one][name] = wrong[name]
        lines = [json.dumps(record) for record in records]
    else:  # a text with the times of one and the audio of another
        if kind == "swap":
            records[one]["audio"] = records[other]["audio"]
        else:
            del records[one][rng.choice(sorted(records[one].keys() - {"source", "speaker"}))]
        lines = [json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return kind


def test_a_damaged_folder_is_refused_whatever_the_damage(source, output, collect):
    collect(source, output)
    folders = [f for f in (output / "files").iterdir() if len(list(f.glob("*.flac"))) > 1]
    seen = set()
    for number in range(90):
        rng = random.Random(number)
        folder = rng.choice(folders)
        kept = tree(folder)
        seen.add(damages(folder, rng))
        refused(lambda: read_recording(folder, folder.name), folder.name)
        refused(lambda: write_collection(output), folder.name)
        for name, content in kept.items():
            (folder / name).write_bytes(content)
    assert len(seen) == 10
    write_collection(output)
    other = np.load(folders[0] / "embeddings.npy")
    np.save(folders[0] / "embeddings.npy", np.pad(other, [(0, 0), (0, 1)]))
    refused(lambda: write_collection(output), "embeddings of another size", "4", "5")
    np.save(folders[0] / "embeddings.npy", other)
    (output / "speakers.json").write_text('{"a": 1')
    refused(lambda: write_collection(output), "speakers.json", "new names")


@pytest.mark.parametrize(
    "change",
    [
        {"collection": "x')); COPY (SELECT 1) TO PROGRAM 'touch owned'; --"},
        {"collection": "0" * 31},
        {"files": {"../../elsewhere": "a.wav"}},
        {"files": {"0" * 16: 5}},
        {"settings": {"speaker_threshold": "high"}},
    ],
)
def test_names_of_a_strangers_folder_reach_no_database_and_no_path(
    source, output, collect, capsys, change
):
    collect(source, output)
    record = json.loads((output / "collect.json").read_text())
    (output / "collect.json").write_text(json.dumps(record | change))
    refused(lambda: write_collection(output), "collect.json")
    capsys.readouterr()
    for command in (["collect", str(source)], ["annotate"]):
        assert cli.main([*command, str(output)]) == 2
        assert "collect.json" in capsys.readouterr().err


def test_the_time_left_is_told_from_all_the_time_so_far(tmp_path, monkeypatch):
    """A file that is done after ten minutes was not done in the second of the last look."""
    now, left = [0.0], []
    queue = SimpleNamespace(
        counts=lambda: {"pending": 2, "claimed": 0},
        totals=lambda: (100 * (now[0] > 600), 200, 0.0),
        jobs=lambda state="": {},
    )

    def run_here(job, devices, count, queue, watch):
        while now[0] < 603:
            now[0] += 1
            watch()
        left.append(bars[0].format_dict)

    bars = []
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    monkeypatch.setattr(run_workers, "run_here", run_here)
    watched = type("watched", (tqdm.std.tqdm,), {})
    init = watched.__init__

    def kept(self, *arguments, **options):
        bars.append(self)
        init(self, *arguments, **options)

    watched.__init__ = kept
    monkeypatch.setattr(tqdm, "tqdm", watched)
    options, job = Options(source="", output=str(tmp_path)), SimpleNamespace(output=str(tmp_path))
    _work(options, job, queue)
    shown = left[0]
    rate = shown["rate"] or (shown["n"] - shown["initial"]) / shown["elapsed"]
    assert 500 < (shown["total"] - shown["n"]) / rate < 700
