"""Text features made by several jobs at once, and by workers of a preparation."""

import errno
import fcntl
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.encoded_shards import SAMPLES, SHARDS, Made, write_shards
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.prepare import encode_text
from torchtitan.models.dit_tts.text import encode_features
from torchtitan.models.dit_tts.text import feature_store as feature_file
from torchtitan.models.dit_tts.text.feature_builder import open_text_features

TARS = [f"{shard:06d}.tar" for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return write_tiny_t5gemma2(tmp_path_factory.mktemp("encoders") / "tiny-gemma")


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "train")


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_first_of_two_jobs_keeps_its_files(shards, gemma, monkeypatch, hard_links):
    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(feature_file.os, "link", refuse)
    first, second = Made(shards, gemma), Made(shards, gemma)
    encode, begun, training = second.module.encode, [], []

    def later_and_on_another_machine(texts):
        begun.append(texts)
        if not training:
            first.make()
            training.append(open_text_features(first.dataset, first.kind))
        return [features * (1 + 1e-6) for features in encode(texts)]

    monkeypatch.setattr(second.module, "encode", later_and_on_another_machine)
    second.make()
    for sample in range(SAMPLES):
        first.read(sample, training[0])
    assert len(begun) == 1  # the other shards had their files when their turn came
    whole = [f"{shard:06d}.safetensors" for shard in range(SHARDS)]
    assert sorted(os.listdir(first.path(0).parent)) == whole


def test_what_killed_writers_left_goes_also_on_nfs(tmp_path, monkeypatch):
    path = tmp_path / f"{'a' * 150}.safetensors"  # temporary names are cut
    with atomic_file(path):
        (alive,) = tmp_path.iterdir()
    left = [alive.with_name(f"{alive.name[:-12]}{end}.tmp") for end in ("dead", "alive")]
    for temporary in left:
        temporary.write_bytes(b"half")
        os.utime(temporary, (time.time() - 60,) * 2)
    lock = fcntl.flock

    def as_on_nfs(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, operation)

    with open(left[1], "r+b") as writer:
        lock(writer, fcntl.LOCK_EX)
        monkeypatch.setattr(feature_file.fcntl, "flock", as_on_nfs)
        feature_file.remove_abandoned(str(path))
        assert sorted(tmp_path.iterdir()) == sorted([left[1], path])


def encode(model: Path, **encoder) -> dict[str, int]:
    config = Encoder(model=str(model), dtype="float32", **encoder)
    return encode_text.encode_texts(Path("train"), TARS, config, "cpu", "local")


def use_workers(monkeypatch, work) -> list[tuple]:
    """Lets `work(*job)` stand for workers on other machines; the jobs that they get."""
    given = []

    @contextmanager
    def engine(*args):
        def runner(function, jobs):
            given.extend(jobs)
            for job in jobs:
                work(*job)
                yield {"texts": 10}

        yield runner

    monkeypatch.setattr(encode_text, "open_engine", engine)
    monkeypatch.setattr(encode_text, "SETTLE_SECONDS", 0)
    return given


def test_workers_that_write_elsewhere_are_noticed(shards, gemma, monkeypatch):
    jobs = use_workers(monkeypatch, lambda *job: None)
    monkeypatch.chdir(shards.parent)
    with pytest.raises(
        InputError, match="missing for 3 of 3 shards.*the workers do not write where"
    ):
        encode(gemma)
    assert [job[0] for job in jobs] == [str(shards / tar) for tar in TARS]


@pytest.mark.long
def test_workers_with_another_encoder_are_noticed(shards, gemma, tmp_path, monkeypatch):
    def work(*job):
        other = Made(shards, write_tiny_t5gemma2(tmp_path / "worker" / gemma.name, seed=1))
        other.kind = replace(other.kind, model=str(gemma))
        other.make()

    use_workers(monkeypatch, work)
    monkeypatch.chdir(shards.parent)
    with pytest.raises(InputError, match="made with other encoder weights"):
        encode(gemma)


def test_texts_that_are_too_long_are_counted(shards, gemma, monkeypatch):
    monkeypatch.setattr(encode_features, "LONGEST_TEXT", 5)
    monkeypatch.chdir(shards.parent)
    made = Made(shards, gemma)
    too_long = sum(len(made.ids(sample)) > 5 for sample in range(SAMPLES))
    assert 0 < too_long < SAMPLES
    expected = {"texts": SAMPLES, "made": SAMPLES, "too_long": too_long, "longest": 5}
    assert encode(gemma) == expected
    assert encode(gemma) == expected | {"made": 0}
