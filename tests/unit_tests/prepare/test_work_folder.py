"""Killed work continues to the same bytes, mixes with no other, and replaces nothing."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.speech_corpora import AS_IS, prepare, write_tones
from tests.helpers.tars import write_tar
from titan_tts.prepare import (
    audio_reader,
    encode,
    listing,
    pipeline,
    work_folder,
)
from titan_tts.prepare.settings import Options
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec import build_codec

SMALL = {"samples_per_shard": 2, "chunk_items": 2, "audio": AS_IS}
OTHER = SMALL | {"seed": 1}
SKIP = {"on_error": "skip", "max_corrupt_fraction": 1}
OUTPUT_NAMES = ["prepare.json", "train"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A manifest of six recordings of one speaker."""
    return write_tones(tmp_path / "corpus", "012345", speaker="ann")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def beside(out: Path) -> list[str]:
    return sorted(name for name in os.listdir(out.parent) if name.startswith(out.name))


def shards(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("*/*.tar"))}


class Killed(BaseException):
    """Stands for a kill: no code of ours may handle it."""


def kill(*args, **kwargs):
    raise Killed


def killed(monkeypatch, place, name, corpus, out, **options) -> None:
    """A preparation that dies when it calls `place.name`."""
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(place, name, kill)
        prepare(corpus, out, **options)


def test_second_run_does_nothing_and_a_change_is_refused(corpus, out, monkeypatch):
    first = prepare(corpus, out, **SMALL)
    before, shard = shards(out), out / "train/shard-000000.tar"
    inode = shard.stat().st_ino
    again = prepare(corpus, out, **SMALL)
    assert again == first | {"reused": True} and shard.stat().st_ino == inode
    other = build_codec(Options.codec)
    other.fingerprint = "of other weights"
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "build_codec", lambda *_: other)
        with pytest.raises(InputError, match="codec_fingerprint was .* is 'of other weights'"):
            prepare(corpus, out, **SMALL)
    with pytest.raises(InputError, match=r"other settings \(seed was 0, is 1\).*another output"):
        prepare(corpus, out, **OTHER)
    assert shards(out) == before and sorted(os.listdir(out)) == OUTPUT_NAMES
    os.utime(corpus.parent / "0.wav", (1, 1))
    made = (out / "prepare.json").stat().st_mtime
    for later, named in ((-1, "since; corrected texts, too"), (1, f"since .{corpus} is newer.; ")):
        os.utime(corpus, (made + later, made + later))
        with pytest.raises(InputError, match=f"the source's files have changed {named}"):
            prepare(corpus, out, **SMALL)
    shard.write_bytes(b"corrupt")
    with pytest.raises(InputError, match="lacks shards"):
        prepare(corpus, out, **SMALL)
    assert beside(out) == ["out"]


def test_interrupted_work_is_kept_and_goes_on(corpus, out, monkeypatch, capsys):
    """An error ends the run after the first chunk; the next run encodes the rest alone."""
    complete = prepare(corpus, out.with_name("complete"), **SMALL)
    for name in ("load_index", "write_atomic"):  # half-way through its first chunk
        killed(monkeypatch, encode, name, corpus, out, **SMALL)
    real = encode._encode
    encoded = []

    def breaks(*of_chunk):
        if encoded:
            raise InputError("pulled the plug")
        encoded.append(of_chunk)
        return real(*of_chunk)

    with monkeypatch.context() as patched, pytest.raises(InputError, match="plug"):
        patched.setattr(encode, "_encode", breaks)
        prepare(corpus, out, **SMALL)
    assert beside(out) == ["out.partial"]
    with pytest.raises(InputError, match=r"begun with other settings \(seed was 0, is 1\)"):
        prepare(corpus, out, **OTHER)
    capsys.readouterr()
    record = prepare(corpus, out, **SMALL)
    assert record["encoded_now"] == 4
    assert "| 2/6 [" in capsys.readouterr().err.rpartition("\rencoding")[0]
    assert shards(out) == shards(out.with_name("complete"))
    assert all(record[name] == complete[name] for name in ("shards", "summary"))
    assert beside(out) == ["out"]


def test_killed_in_the_last_steps(corpus, out, monkeypatch):
    """After prepare.json is written, before and after the rename, and with a file that a killed writer left."""
    prepare(corpus, out.with_name("complete"), **SMALL)
    expected, partial = shards(out.with_name("complete")), out.with_name("out.partial")
    for place, name in ((work_folder, "finish"), (Path, "rename")):
        killed(monkeypatch, place, name, corpus, out, **SMALL)
        assert (partial / "prepare.json").exists() and not out.exists()
        with pytest.raises(InputError, match="begun with other settings"):
            prepare(corpus, out, **OTHER)
    (partial / "train/.x.tmp").touch()
    killed(monkeypatch, work_folder, "remove_scratch", corpus, out, **SMALL)
    assert shards(out) == expected and (out / "chunks").exists() and beside(out) == ["out"]
    assert prepare(corpus, out, **SMALL)["reused"] is True
    assert sorted(os.listdir(out)) == OUTPUT_NAMES and not (out / "train/.x.tmp").exists()
    out.rename(partial)
    with pytest.raises(InputError, match="partial: has files and no state.json; remove"):
        prepare(corpus, out, **SMALL)


def test_work_of_other_versions_is_not_continued(corpus, out, monkeypatch):
    killed(monkeypatch, pipeline, "_shard_stage", corpus, out, **SMALL)
    versions = lambda: {"torch": "99"}  # noqa: E731
    for place, name, value, message in (
        (work_folder, "RECORD_VERSION", 99, "version of prepare was [0-9]*, is 99"),
        (work_folder, "WORK_VERSION", 99, "version of work folder was [0-9]*, is 99"),
        (pipeline, "library_versions", versions, "version of torch was '[^']*', is '99'"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value)
            with pytest.raises(InputError, match=f"other settings .*{message}.*remove the folder"):
                prepare(corpus, out, **SMALL)
    record = prepare(corpus, out, **SMALL)
    assert record["versions"]["numpy"] == np.__version__
    # A complete output mixes nothing.
    monkeypatch.setattr(pipeline, "library_versions", versions)
    assert prepare(corpus, out, **SMALL)["reused"] is True


@pytest.mark.parametrize("step", ["list", "read", "tar"])
def test_a_failing_disk_makes_no_recording_corrupt(step, corpus, out, monkeypatch):
    """Or a store that is away for an hour would cost all of its recordings."""

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    def refuse(path):
        raise InputError("status 503")

    if step == "tar":
        data = (corpus.parent / "0.wav").read_bytes()
        corpus = corpus.parent / "c.tar"
        write_tar(corpus, [("a.wav", data), ("a.json", b'{"text": "x", "speaker": "s"}')])
        monkeypatch.setattr(audio_reader, "open_source", refuse)
    elif step == "read":
        monkeypatch.setattr(Path, "read_bytes", fail)
    else:
        real, bad = os.stat, str(corpus.parent / "3.wav")
        failing = lambda path, **k: fail() if path == bad else real(path, **k)  # noqa: E731
        monkeypatch.setattr(listing.os, "stat", failing)
    with pytest.raises(InputError, match="Input/output error|status 503") as caught:
        prepare(corpus, out, **SMALL, **SKIP)
    assert "--on-error" not in str(caught.value)


def test_a_chunk_that_lacks_samples_is_noticed(corpus, out, monkeypatch):
    killed(monkeypatch, pipeline, "summarize", corpus, out, **SMALL)
    chunk = out.with_name("out.partial") / "chunks/train/00000002.tar"
    of_two = open_dataset(str(chunk))
    latents, reference = of_two.read(0)
    write_shard(chunk, [Triplet(of_two.key(0), latents, reference, of_two.metadata(0))])
    with pytest.raises(InputError, match="not all of its encoded chunks"):
        prepare(corpus, out, **SMALL)


@pytest.mark.parametrize(
    "record", [None, '{"mine": 1}', '{"version": 1, "settings": {}, "shards": {}}']
)
def test_foreign_files_are_not_replaced(record, corpus, out):
    out.mkdir()
    (out / "thesis.tex").write_text("ten years of work")
    if record:
        (out / "prepare.json").write_text(record)
    why = "another version" if "version" in (record or "") else "no prepare.json of this command"
    with pytest.raises(InputError, match=f"{why}.*; give another output"):
        prepare(corpus, out, **SMALL)
    assert (out / "thesis.tex").exists() and beside(out) == ["out"]


def test_an_output_may_be_a_link_and_what_appears_in_it_meanwhile_stays(corpus, out, monkeypatch):
    (out.parent / "link").symlink_to("out")

    def appear(*args):
        out.mkdir()
        (out / "thesis.tex").write_text("ten years of work")
        return real(*args)

    real = pipeline._shard_stage
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_shard_stage", appear)
        with pytest.raises(InputError, match="created meanwhile.*kept in"):
            prepare(corpus, out, **SMALL)
    assert os.listdir(out) == ["thesis.tex"] and beside(out) == ["out", "out.partial"]
    (out / "thesis.tex").unlink()
    monkeypatch.setattr(encode, "_encode", kill)  # the work is complete
    assert prepare(corpus, out.parent / "link", **SMALL)["reused"] is False
    assert (out.parent / "link").is_symlink() and sorted(os.listdir(out)) == OUTPUT_NAMES
