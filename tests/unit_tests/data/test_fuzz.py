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
SEEDS_PER_KIND = 15
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


def remove_range(data, rng):
    start = int(rng.integers(0, len(data)))
    del data[start : start + int(rng.integers(1, 5000))]


def insert_noise(data, rng):
    start = int(rng.integers(0, len(data)))
    data[start:start] = rng.bytes(int(rng.integers(1, 2000)))


def repeat_blocks(data, rng):
    start, to = (int(n) * 512 for n in rng.integers(0, len(data) // 512, 2))
    data[to:to] = data[start : start + 512 * int(rng.integers(1, 12))]


def swap_blocks(data, rng):
    a, b = (int(n) * 512 for n in rng.integers(0, len(data) // 512, 2))
    data[a : a + 512], data[b : b + 512] = data[b : b + 512], data[a : a + 512]


IN_PLACE = [flip_bits, overwrite_range, swap_blocks]
RESIZING = [cut, remove_range, insert_noise, repeat_blocks]


def edit_tar_header(data, rng):
    """Flip bits in the header of one member."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = tar.getmembers()[int(rng.integers(0, 36))]
    for position in rng.integers(0, 345, int(rng.integers(1, 4))):
        data[member.offset + position] ^= 1 << int(rng.integers(0, 8))


def edit_npy_header(data, rng):
    """Change the text of one npy header, which no checksum of the tar covers."""
    starts = [i for i in range(0, len(data), 512) if data[i : i + 6] == b"\x93NUMPY"]
    start = int(rng.choice(starts))
    header = bytes(data[start + 10 : start + 128])
    edits = [
        header.replace(b"<f2", [b"|O ", b"<i2", b">f2", b"<f8", b"<f4"][rng.integers(0, 5)]),
        header.replace(b"False", b"True "),
        header.replace(b", 8)", [b", 9)", b", 4)", b",-8)", b", 0)"][rng.integers(0, 4)]),
        bytes(rng.permutation(np.frombuffer(header, np.uint8))),
        b"(" * len(header),
    ]
    data[start + 10 : start + 128] = edits[int(rng.integers(0, len(edits)))]
    if rng.random() < 0.3:
        data[start + int(rng.integers(6, 10))] = int(rng.integers(0, 256))


def edit_json(data, rng):
    """Change the text of one JSON in place: another value, another type, no JSON at all."""
    starts = [i for i in range(0, len(data), 512) if data[i : i + 2] == b'{"']
    start = int(rng.choice(starts))
    end = data.index(b"\0", start)
    body, length = bytes(data[start:end]), end - start
    edits = [
        body.replace(b"zero", b"nine").replace(b"one", b"two").replace(b"e", b"o"),
        body.replace(b'"text"', b'"texd"'),
        b"[" * length,
        body[: length // 2] + b"\xff" * (length - length // 2),
        b'{"text": 5}'.ljust(length),
        b'{"text": "x"}'.ljust(length, b"\0"),
        b'{"text": "\\ud800"}'.ljust(length),
    ]
    data[start:end] = edits[int(rng.integers(0, len(edits)))]
    assert data[end] == 0


def check_sample(dataset, number):
    loaded = dataset.load(number)
    wanted = SAMPLE_OF[dataset.key(number)]
    np.testing.assert_array_equal(loaded.latents, wanted.latents)
    np.testing.assert_array_equal(loaded.reference, wanted.reference)
    # A flip in the name of the hashes' key leaves a sample like a foreign writer's, all of it right.
    assert {name: loaded.metadata.get(name) for name in wanted.metadata} == wanted.metadata


def outcome(folder):
    """What both policies make of a folder: (raised, problems + corrupt reads)."""

    def strict():
        try:
            dataset = open_dataset(str(folder), CHANNELS)
            for number in range(len(dataset)):
                check_sample(dataset, number)
        except InputError as error:
            assert str(error) and "\n" not in str(error)
            return True
        assert len(dataset) == len(SAMPLES)
        return False

    def lenient():
        try:
            dataset = open_dataset(str(folder), CHANNELS, on_error="skip", max_corrupt_fraction=1.0)
        except InputError as error:
            assert "beside 0 valid ones" in str(error) and "\n" not in str(error)
            return -1
        counted = len(dataset.problems)
        for number in range(len(dataset)):
            try:
                check_sample(dataset, number)
            except CorruptSampleError as error:
                assert "\n" not in str(error)
                counted += 1
        loader = build(folder, num_buckets=1, on_error="skip", max_corrupt_fraction=1.0)
        for inputs, _ in take(loader, 5):
            for row, name in enumerate(inputs["sample_id"]):
                frames = int(inputs["frames"][row])
                wanted = SAMPLE_OF[name.split(":")[1]].latents
                np.testing.assert_array_equal(inputs["latents"][row, :frames], wanted)
        return counted

    raised, counted = strict(), lenient()
    assert raised == (counted != 0), (raised, counted)
    return raised


def copy_of(valid, folder, with_index):
    shutil.copytree(valid, folder)  # keeps times, so that the indexes stay fresh
    if not with_index:
        for path in folder.glob("*.idx"):
            path.unlink()
    return folder


def corrupt(path, change, rng, keep_time):
    before = os.stat(path)
    data = bytearray(path.read_bytes())
    change(data, rng)
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def fuzz(valid, tmp_path, change, *, keep_time=False, with_index=False, at_least=0.5):
    found = 0
    for seed in range(SEEDS_PER_KIND):
        folder = copy_of(valid, tmp_path / str(seed), with_index)
        corrupt(folder / "a.tar", change, np.random.default_rng(seed), keep_time)
        found += outcome(folder)
    assert found >= at_least * SEEDS_PER_KIND  # the corruption was corruption, and was found


@pytest.mark.parametrize("how", [*IN_PLACE, *RESIZING])
def test_tars_corrupt_before_they_are_indexed(valid, tmp_path, how):
    fuzz(valid, tmp_path, how)


@pytest.mark.parametrize("how", IN_PLACE)
def test_tars_corrupt_after_they_were_indexed(valid, tmp_path, how):
    fuzz(valid, tmp_path, how, keep_time=True, with_index=True, at_least=0.3)


@pytest.mark.parametrize("how", [edit_tar_header, edit_npy_header, edit_json])
def test_headers_and_json(valid, tmp_path, how):
    fuzz(valid, tmp_path, how, at_least=0.9)


@pytest.mark.long
@pytest.mark.parametrize("how", [*IN_PLACE, *RESIZING])
def test_corrupt_indexes_are_rebuilt(valid, tmp_path, how):
    """An index only repeats the tar: its corruption costs time and nothing else."""
    for seed in range(SEEDS_PER_KIND):
        folder = copy_of(valid, tmp_path / str(seed), with_index=True)
        corrupt(folder / "b.tar.idx", how, np.random.default_rng(seed), keep_time=False)
        assert not outcome(folder)


@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"-77777777777", b"0x000000010\0", b"1_000000000\0", b"\xff" * 12]
)
def test_sizes_that_no_tar_has(tmp_path, size):
    """With a checksum that agrees, as a hostile or odd writer makes them."""
    write_shard(tmp_path / "a.tar", SAMPLES)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[124:136] = size
    data[148:156] = b" " * 8
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
