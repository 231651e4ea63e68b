"""What a preparation keeps: nothing that is not its own goes, and its work mixes with no other."""

import errno
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare import encode, pipeline, report, work_folder
from torchtitan.models.dit_tts.prepare import pack_shards as shards
from torchtitan.models.dit_tts.prepare.audio_reader import Loader
from torchtitan.models.dit_tts.prepare.pipeline import RunOptions, prepare_corpus
from torchtitan.models.dit_tts.prepare.settings import AudioSettings, PrepareSettings

SMALL = PrepareSettings(
    samples_per_shard=2, chunk_items=2, audio=AudioSettings(loudness=None, max_silence=None)
)
OTHER = replace(SMALL, seed=1)
HERE = RunOptions(workers=1)
SKIP = RunOptions(workers=1, on_error="skip", max_corrupt_fraction=1)
OVERWRITE = RunOptions(workers=1, overwrite=True)
OUTPUT_NAMES = ["prepare.json", "report.md", "train"]


def tone(number: int) -> bytes:
    audio = io.BytesIO()
    samples = 0.1 * np.sin(np.arange(3200) * (0.02 + 0.001 * number))
    soundfile.write(audio, samples, 16_000, format="WAV")
    return audio.getvalue()


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A manifest of four recordings of one speaker."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = []
    for number in range(4):
        (folder / f"{number}.wav").write_bytes(tone(number))
        row = {"audio": f"{number}.wav", "text": f"text {number}", "speaker": "ann"}
        lines.append(json.dumps(row) + "\n")
    (folder / "list.jsonl").write_text("".join(lines))
    return folder / "list.jsonl"


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def beside(out: Path) -> list[str]:
    return sorted(name for name in os.listdir(out.parent) if name.startswith(out.name))


class Killed(BaseException):
    """Stands for a kill: nothing of ours may handle it."""


def kill(*args, **kwargs):
    raise Killed


def during_the_work(monkeypatch, act) -> None:
    real = pipeline._collect
    monkeypatch.setattr(pipeline, "_collect", lambda *args: (act(), real(*args))[1])


@pytest.mark.parametrize("options", [HERE, OVERWRITE])
def test_what_appears_in_the_output_during_the_work_stays(corpus, out, options, monkeypatch):
    def appear():
        out.mkdir()
        (out / "thesis.tex").write_text("ten years of work")

    with monkeypatch.context() as patched:
        during_the_work(patched, appear)
        with pytest.raises(InputError, match="changed by others.*kept in"):
            prepare_corpus(corpus, out, SMALL, options)
    assert os.listdir(out) == ["thesis.tex"] and beside(out) == ["out", "out.partial"]
    out.rename(out.with_name("elsewhere"))
    monkeypatch.setattr(pipeline, "_build", kill)  # the work is whole: only the rename is left
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is False
    assert sorted(os.listdir(out)) == OUTPUT_NAMES


def test_an_output_that_appears_during_the_work_stays(corpus, out, monkeypatch):
    """Also one of this command's, and with --overwrite, where it was not there to be overwritten."""
    prepare_corpus(corpus, other := out.with_name("other"), OTHER, HERE)
    during_the_work(monkeypatch, lambda: other.rename(out))
    with pytest.raises(InputError, match="changed by others"):
        prepare_corpus(corpus, out, SMALL, OVERWRITE)
    assert work_folder.read_record(out)["settings"]["seed"] == 1


@pytest.mark.parametrize("name", ["notes.txt", "train/best.pt"])
def test_foreign_files_in_an_output_stay(name, corpus, out, monkeypatch):
    prepare_corpus(corpus, out, SMALL, HERE)
    (out / name).write_text("mine")
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is True
    with pytest.raises(InputError, match=f"it holds {name}, which is none of it"):
        prepare_corpus(corpus, out, OTHER, OVERWRITE)
    (out / name).unlink()
    during_the_work(monkeypatch, lambda: (out / name).write_text("mine"))
    with pytest.raises(InputError, match="changed by others"):
        prepare_corpus(corpus, out, OTHER, OVERWRITE)
    assert (out / name).read_text() == "mine" and (out / "prepare.json").exists()


@pytest.mark.parametrize("record", ['{"mine": 1}', '{"version": 1, "settings": {}}', "[]"])
def test_a_record_of_another_program_is_none(record, corpus, out):
    out.mkdir()
    (out / "prepare.json").write_text(record)
    with pytest.raises(InputError, match="no prepare.json of this command"):
        prepare_corpus(corpus, out, SMALL, OVERWRITE)
    assert (out / "prepare.json").read_text() == record


def test_an_output_of_an_earlier_version_may_be_overwritten(corpus, out):
    out.mkdir()
    old = {"version": 1, "settings": {}, "shards": {}}
    (out / "prepare.json").write_text(json.dumps(old))
    with pytest.raises(InputError, match="another version; pass --overwrite"):
        prepare_corpus(corpus, out, SMALL, HERE)
    prepare_corpus(corpus, out, SMALL, OVERWRITE)
    assert sorted(os.listdir(out)) == OUTPUT_NAMES


def test_shards_of_other_chunks_are_made_anew(corpus, out, monkeypatch):
    """A chunk that is removed, as its message says, and encoded anew with one recording more."""
    real = Loader.load

    def load(self, place, channels):
        if place["file"] == "0.wav":
            raise InputError("input/output error")
        return real(self, place, channels)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Loader, "load", load)
        patched.setattr(report, "markdown", kill)
        prepare_corpus(corpus, out, SMALL, SKIP)
    chunk = out.with_name("out.partial") / "chunks/00000/00000000.chunk"
    with open(chunk, "r+b") as file:
        file.write(b"XXXX")
    with pytest.raises(InputError, match="is damaged; remove it and start again"):
        prepare_corpus(corpus, out, SMALL, SKIP)
    chunk.unlink()
    summary = prepare_corpus(corpus, out, SMALL, SKIP)["summary"]
    dataset = open_dataset(str(out / "train"))
    assert [dataset.sample_id(n).rpartition(":")[2] for n in range(4)] == ["0", "1", "2", "3"]
    assert summary["train"]["samples"] == len(dataset) == 4 and not summary["dropped"]


def test_a_shard_that_lacks_samples_is_told(corpus, out, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(report, "markdown", kill)
        prepare_corpus(corpus, out, SMALL, HERE)
    train = out.with_name("out.partial") / "train"
    with tarfile.open(train / "shard-000000.tar") as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar][:3]
    with tarfile.open(train / "shard-000000.tar", "w") as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(InputError, match="holds 1 sound samples of 2; remove it"):
        prepare_corpus(corpus, out, SMALL, HERE)
    (train / "shard-000000.tar").unlink()
    assert prepare_corpus(corpus, out, SMALL, HERE)["summary"]["train"]["samples"] == 4


def test_an_output_behind_a_link(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    for target in ("empty", "absent"):
        link = tmp_path / f"to_{target}"
        link.symlink_to(target)
        assert prepare_corpus(corpus, link, SMALL, HERE)["reused"] is False
        assert prepare_corpus(corpus, link, SMALL, HERE)["reused"] is True
        assert link.is_symlink() and sorted(os.listdir(tmp_path / target)) == OUTPUT_NAMES


def test_a_mount_point_is_refused_before_the_work(corpus, out, monkeypatch):
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    with pytest.raises(InputError, match="is a mount point"):
        prepare_corpus(corpus, out, SMALL, HERE)
    assert beside(out) == ["out"]


def test_a_rename_that_fails_keeps_the_work(corpus, out, monkeypatch):
    def busy(*args):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", busy)
        with pytest.raises(InputError, match="cannot be put in its place .Device or resource busy"):
            prepare_corpus(corpus, out, SMALL, HERE)
    monkeypatch.setattr(pipeline, "_build", kill)
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is False


def test_killed_between_the_two_renames(corpus, out, monkeypatch):
    """Whoever goes back to the earlier settings finds the earlier output, and the later work too."""
    prepare_corpus(corpus, out, SMALL, HERE)
    real = Path.rename
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(
            Path, "rename", lambda p, to: kill() if p.suffix == ".partial" else real(p, to)
        )
        prepare_corpus(corpus, out, OTHER, OVERWRITE)
    assert beside(out) == ["out.partial"]
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is True
    assert sorted(os.listdir(out)) == OUTPUT_NAMES
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_build", kill)
        assert prepare_corpus(corpus, out, OTHER, OVERWRITE)["reused"] is False
    assert beside(out) == ["out"] and work_folder.read_record(out)["settings"]["seed"] == 1


@pytest.mark.parametrize("module, name", [(encode, "write_chunk"), (shards, "write_shard")])
def test_a_full_disk_is_one_sentence(module, name, corpus, out, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, name, full)
        with pytest.raises(InputError, match="No space left on device.*what is done is kept"):
            prepare_corpus(corpus, out, SMALL, HERE)
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is False


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", AudioSettings.__dataclass_fields__)
def test_numbers_are_finite(name, value):
    option = name.replace("_", "-")
    with pytest.raises(InputError, match=f"--{option} is .*finite"):
        PrepareSettings(audio=AudioSettings(**{name: value})).check()


def test_names_that_are_no_characters_stand_in_the_report(corpus, out):
    row = {"audio": "\udcff.wav", "text": "x", "speaker": "ann"}
    with open(corpus, "a") as file:
        file.write(json.dumps(row) + "\n")
    prepare_corpus(corpus, out, SMALL, SKIP)
    assert r"\udcff" in (out / "report.md").read_text()


def test_a_file_system_without_locks(corpus, out, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(work_folder.fcntl, "flock", no_locks)
    with pytest.raises(InputError, match="no lock can be taken there .No locks available"):
        prepare_corpus(corpus, out, SMALL, HERE)


def test_work_of_other_versions_is_not_gone_on_with(corpus, out, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(pipeline, "_collect", kill)
        prepare_corpus(corpus, out, SMALL, HERE)
    for change, said in (
        ((work_folder, "RECORD_VERSION", 99), "prepare was [0-9]*, is 99"),
        ((pipeline, "library_versions", lambda: {"torch": "99"}), "torch was '[^']*', is '99'"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(*change)
            with pytest.raises(InputError, match=f"by other versions .*{said}.*--overwrite"):
                prepare_corpus(corpus, out, SMALL, HERE)
    record = prepare_corpus(corpus, out, SMALL, HERE)
    assert record["versions"]["numpy"] == np.__version__
    # A complete output mixes nothing.
    monkeypatch.setattr(pipeline, "library_versions", lambda: {"torch": "99"})
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is True


def test_content_is_compared_once(corpus, out, monkeypatch):
    prepare_corpus(corpus, out, SMALL, HERE)
    os.utime(corpus.parent / "0.wav", (1, 1))
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is True
    monkeypatch.setattr(pipeline, "_same_content", kill)
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is True


def test_the_format_that_was_found_is_the_one_that_is_named(corpus, out):
    record = prepare_corpus(corpus, out, SMALL, HERE)
    assert record["settings"]["format"] == "manifest"
    named = replace(SMALL, format="manifest")
    assert prepare_corpus(corpus, out, named, HERE)["reused"] is True


def write_tars(folder: Path, counts: list[int]) -> list[Path]:
    folder.mkdir()
    paths, data = [], tone(1)
    for number, count in enumerate(counts):
        paths.append(folder / f"{number}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for one in range(count):
                text = json.dumps({"text": f"text {one}", "speaker": "ann"}).encode()
                for name, content in ((f"{one}.wav", data), (f"{one}.json", text)):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return paths


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def test_a_tar_that_is_cut_short_weighs_what_it_lost(tmp_path, out):
    paths = write_tars(tmp_path / "tars", [30, 30, 30])
    cut(paths[1], 0.04)
    with pytest.raises(InputError, match="2[89] of 90 recordings are damaged"):
        prepare_corpus(paths[0].parent, out, SMALL, replace(SKIP, max_corrupt_fraction=0.3))
    summary = prepare_corpus(paths[0].parent, out, SMALL, SKIP)["summary"]
    assert summary["train"]["samples"] + summary["dropped"]["undecodable"] == 90


def test_a_lone_tar_that_is_cut_short(tmp_path, out):
    """Nothing tells what it held: as many recordings as are left are taken for lost."""
    (path,) = write_tars(tmp_path / "tars", [20])
    cut(path, 0.5)
    with pytest.raises(InputError, match="damaged, more than --max-skipped-share 0.4 allows"):
        prepare_corpus(path, out, SMALL, replace(SKIP, max_corrupt_fraction=0.4))


@pytest.mark.long
def test_damage_inside_a_tar_weighs_the_bytes_that_are_lost(tmp_path, out):
    """One header costs one recording, a lost stretch all that were in it; short tars are no loss."""
    paths = write_tars(tmp_path / "tars", [30, 30, 4])
    content = bytearray(paths[2].read_bytes())
    content[0] ^= 1  # the name in the first header
    paths[2].write_bytes(content)
    summary = prepare_corpus(paths[0].parent, out, SMALL, SKIP)["summary"]
    assert summary["train"]["samples"] == 63 and 1 <= summary["dropped"]["undecodable"] <= 2
    content = bytearray(paths[0].read_bytes())
    content[: len(content) // 2] = bytes([7]) * (len(content) // 2)
    paths[0].write_bytes(content)
    summary = prepare_corpus(paths[0].parent, tmp_path / "two", SMALL, SKIP)["summary"]
    assert summary["train"]["samples"] in (47, 48)
    # Halves of recordings at the edge of the stretch are told as such, too.
    assert summary["dropped"]["undecodable"] in range(17, 21)
