"""Corruption of every kind, seeded: one sentence or a counted skip, never a wrong sample."""

import io
import os
import shutil
import tarfile

import numpy as np
import pytest

from tests.helpers.loaders import build, take
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError

CHANNELS = 8
SEEDS_PER_KIND = 5
SAMPLES = make_samples(
    24,
    seed=11,
    channels=CHANNELS,
    frames=lambda rng: int(rng.integers(8, 60)),
    max_reference_frames=20,
)
SAMPLE_OF = {sample.key: sample for sample in SAMPLES}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A folder of two shards with their indexes."""
    folder = tmp_path_factory.mktemp("valid")
    write_shard(folder / "a.tar", SAMPLES[:12])
    write_shard(folder / "b.tar", SAMPLES[12:])
    open_dataset(str(folder), CHANNELS)
    return folder


def flip_bits(data, rng):
    for position in rng.integers(0, len(data), int(rng.integers(1, 9))):
        data[position] ^= 1 << int(rng.integers(0, 8))


def overwrite_range(data, rng):
    start = int(rng.integers(0, len(data)))
    size = min(int(rng.integers(1, 5000)), len(data) - start)
    data[start : start + size] = bytes(size) if rng.random() < 0.5 else rng.bytes(size)


def cut(data, rng):
    end = int(rng.integers(0, len(data)))
    del data[end if rng.random() < 0.5 else end // 512 * 512 :]


def insert_noise(data, rng):
    start = int(rng.integers(0, len(data)))
    data[start:start] = rng.bytes(int(rng.integers(1, 2000)))


def swap_blocks(data, rng):
    a, b = (int(n) * 512 for n in rng.integers(0, len(data) // 512, 2))
    data[a : a + 512], data[b : b + 512] = data[b : b + 512], data[a : a + 512]


IN_PLACE = [flip_bits, overwrite_range, swap_blocks]
RESIZING = [cut, insert_noise]


def edit_tar_header(data, rng):
    """Flip bits in the header of one member."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = tar.getmembers()[int(rng.integers(0, 36))]
    for position in rng.integers(0, 345, int(rng.integers(1, 4))):
        data[member.offset + position] ^= 1 << int(rng.integers(0, 8))


def check_sample(dataset, number):
    loaded = dataset.load(number)
    wanted = SAMPLE_OF[dataset.key(number)]
    np.testing.assert_array_equal(loaded.latents, wanted.latents)
    np.testing.assert_array_equal(loaded.reference, wanted.reference)
    # A flip in the name of the hashes' key leaves a sample like a foreign writer's, all of it right.
    assert {name: loaded.metadata.get(name) for name in wanted.metadata} == wanted.metadata


def strict(folder) -> bool:
    """Whether [data] on_error = "raise" refuses the folder."""
    try:
        dataset = open_dataset(str(folder), CHANNELS)
        for number in range(len(dataset)):
            check_sample(dataset, number)
    except InputError as error:
        assert str(error) and "\n" not in str(error)
        return True
    assert len(dataset) == len(SAMPLES)
    return False


def lenient(folder) -> int:
    """Problems and corrupt reads with "skip"; -1 where no sample is left."""
    skip = {"on_error": "skip", "max_corrupt_fraction": 1.0}
    try:
        dataset = open_dataset(str(folder), CHANNELS, **skip)
    except InputError as error:
        assert "and 0 valid ones" in str(error) and "\n" not in str(error)
        return -1
    counted = len(dataset.problems)
    for number in range(len(dataset)):
        try:
            check_sample(dataset, number)
        except CorruptSampleError:
            counted += 1
    [(inputs, _)] = take(build(folder, num_buckets=1, **skip), 1)
    for latents, name in zip(inputs["latents"], inputs["sample_id"], strict=True):
        wanted = SAMPLE_OF[name.split(":")[1]].latents
        np.testing.assert_array_equal(latents[: len(wanted)], wanted)
    return counted


def outcome(folder) -> bool:
    raised, counted = strict(folder), lenient(folder)
    assert raised == (counted != 0), (raised, counted)
    return raised


def corrupted(valid, folder, change, seed, after_index=False):
    """A copy of the valid folder with a tar changed."""
    shutil.copytree(valid, folder)  # keeps times, so that the indexes stay fresh
    tar = folder / "a.tar"
    before, data = os.stat(tar), bytearray(tar.read_bytes())
    change(data, np.random.default_rng(seed))
    tar.write_bytes(data)
    if after_index:
        os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        for path in folder.glob("*.idx"):
            path.unlink()
    return folder


def fuzz(valid, tmp_path, change, at_least=0.5, **kept):
    found = sum(
        outcome(corrupted(valid, tmp_path / str(seed), change, seed, **kept))
        for seed in range(SEEDS_PER_KIND)
    )
    assert found >= at_least * SEEDS_PER_KIND  # the corruption was corruption, and was found


@pytest.mark.long
@pytest.mark.parametrize("how", [*IN_PLACE, *RESIZING, edit_tar_header])
def test_tars_corrupt_before_they_are_indexed(valid, tmp_path, how):
    fuzz(valid, tmp_path, how)


@pytest.mark.long
@pytest.mark.parametrize("how", IN_PLACE)
def test_tars_corrupt_after_they_were_indexed(valid, tmp_path, how):
    fuzz(valid, tmp_path, how, at_least=0.3, after_index=True)


@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"-77777777777", b"0x000000010\0", b"1_000000000\0", b"\xff" * 12]
)
def test_sizes_that_no_tar_has(tmp_path, size):
    """With a checksum that agrees: a negative one must not be an endless loop."""
    write_shard(tmp_path / "a.tar", SAMPLES)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[124:136], data[148:156] = size, b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "a.tar").write_bytes(data)
    assert outcome(tmp_path)


def test_a_huge_foreign_npy_is_not_read(tmp_path):
    write_shard(tmp_path / "a.tar", SAMPLES)
    data = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    data += bytes(-len(data) % 512)
    info = tarfile.TarInfo("weights.npy")
    info.size = 64 << 30
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(data + info.tobuf(tarfile.GNU_FORMAT) + b"\x93NUMPY\x01\0")
        file.truncate(len(data) + 512 + info.size + 1024)  # sparse
    assert outcome(tmp_path)
