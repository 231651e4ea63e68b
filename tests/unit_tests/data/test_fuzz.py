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


def flip(data, rng):
    for position in rng.integers(0, len(data), int(rng.integers(1, 9))):
        data[position] ^= 1 << int(rng.integers(0, 8))


def flip_in_a_header(data, rng):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        start = tar.getmembers()[int(rng.integers(0, 36))].offset
    for position in rng.integers(0, 345, int(rng.integers(1, 4))):
        data[start + position] ^= 1 << int(rng.integers(0, 8))


def overwrite(data, rng):
    start = int(rng.integers(0, len(data)))
    size = min(int(rng.integers(1, 5000)), len(data) - start)
    data[start : start + size] = bytes(size) if rng.random() < 0.5 else rng.bytes(size)


def swap_blocks(data, rng):
    a, b = (int(n) * 512 for n in rng.integers(0, len(data) // 512, 2))
    data[a : a + 512], data[b : b + 512] = data[b : b + 512], data[a : a + 512]


def cut(data, rng):
    del data[int(rng.integers(0, len(data))) // 512 * 512 :]


def insert(data, rng):
    start = int(rng.integers(0, len(data)))
    data[start:start] = rng.bytes(int(rng.integers(1, 2000)))


def wrong(dataset) -> int:
    """Samples that cannot be read; all others are right."""
    found = 0
    for number in range(len(dataset)):
        try:
            loaded = dataset.load(number)
        except CorruptSampleError as error:
            assert "\n" not in str(error)
            found += 1
            continue
        wanted = SAMPLE_OF[dataset.key(number)]
        np.testing.assert_array_equal(loaded.latents, wanted.latents)
        np.testing.assert_array_equal(loaded.reference, wanted.reference)
        # A flip in the name of the hashes' key leaves a sample like a foreign writer's, all of it right.
        assert {name: loaded.metadata.get(name) for name in wanted.metadata} == wanted.metadata
    return found


def is_refused(folder) -> bool:
    """Whether [data] on_error = "raise" refuses a folder; "skip" leaves out what is corrupt, and nothing else."""
    try:
        dataset = open_dataset(str(folder), CHANNELS)
        refused = wrong(dataset) > 0
        assert refused or len(dataset) == len(SAMPLES)
    except InputError as error:
        refused = "\n" not in str(error)
    skip = {"on_error": "skip", "max_corrupt_fraction": 1.0}
    try:
        lenient = open_dataset(str(folder), CHANNELS, **skip)
    except InputError as error:
        assert "and 0 valid ones" in str(error)
        return refused
    assert refused == (len(lenient.problems) + wrong(lenient) > 0)
    [(inputs, _)] = take(build(folder, num_buckets=1, **skip), 1)
    for latents, name in zip(inputs["latents"], inputs["sample_id"], strict=True):
        wanted = SAMPLE_OF[name.split(":")[1]].latents
        np.testing.assert_array_equal(latents[: len(wanted)], wanted)
    return refused


BEFORE = [(how, False) for how in (flip, flip_in_a_header, overwrite, swap_blocks, cut, insert)]
AFTER = [(how, True) for how in (flip, overwrite, swap_blocks)]


@pytest.mark.long
@pytest.mark.parametrize("how, after_index", BEFORE + AFTER)
def test_corrupt_tars(valid, tmp_path, how, after_index):
    found = 0
    for seed in range(SEEDS_PER_KIND):
        folder = shutil.copytree(valid, tmp_path / str(seed))  # keeps times: indexes stay fresh
        tar = folder / "a.tar"
        before, data = os.stat(tar), bytearray(tar.read_bytes())
        how(data, np.random.default_rng(seed))
        tar.write_bytes(data)
        if after_index:
            os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            (folder / "a.tar.idx").unlink()
        found += is_refused(folder)
    # The corruption was corruption, and was found.
    assert found >= (0.3 if after_index else 0.5) * SEEDS_PER_KIND


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
    assert is_refused(tmp_path)


def test_a_huge_foreign_npy_is_not_read(tmp_path):
    write_shard(tmp_path / "a.tar", SAMPLES)
    data = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    data += bytes(-len(data) % 512)
    info = tarfile.TarInfo("weights.npy")
    info.size = 64 << 30
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(data + info.tobuf(tarfile.GNU_FORMAT) + b"\x93NUMPY\x01\0")
        file.truncate(len(data) + 512 + info.size + 1024)  # sparse
    assert is_refused(tmp_path)
