"""Corruption of every kind, seeded: one sentence or a counted skip; no traceback, hang or wrong sample."""

import os
import shutil
import signal
import tarfile

import numpy as np
import pytest

from tests.helpers.loaders import build, take
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError

CHANNELS = 8
SEEDS_A_KIND = 15
SECONDS_A_CASE = 20
SAMPLES = make_samples(
    24,
    seed=11,
    channels=CHANNELS,
    frames=lambda rng: int(rng.integers(8, 60)),
    max_reference_frames=20,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound folder of two shards with their indexes."""
    folder = tmp_path_factory.mktemp("sound")
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
    del data[int(rng.integers(0, len(data))) :]


def cut_on_a_block(data, rng):
    del data[int(rng.integers(0, len(data) // 512)) * 512 :]


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


def flip_in_a_header(data, rng, path):
    with tarfile.open(path) as tar:
        member = tar.getmembers()[int(rng.integers(0, 36))]
    for position in rng.integers(0, 345, int(rng.integers(1, 4))):
        data[member.offset + position] ^= 1 << int(rng.integers(0, 8))


IN_PLACE = {
    "flip bits": flip_bits,
    "overwrite a range": overwrite_range,
    "swap blocks": swap_blocks,
}
RESIZING = {
    "cut": cut,
    "cut on a block": cut_on_a_block,
    "remove a range": remove_range,
    "insert noise": insert_noise,
    "repeat blocks": repeat_blocks,
}


def edit_npy_header(data, rng):
    """Change the text of one npy header, which no checksum of the tar covers."""
    starts = [i for i in range(0, len(data), 512) if data[i : i + 6] == b"\x93NUMPY"]
    start = starts[int(rng.integers(0, len(starts)))]
    edits = [
        lambda h: h.replace(b"<f2", [b"|O ", b"<i2", b">f2", b"<f8", b"<f4"][rng.integers(0, 5)]),
        lambda h: h.replace(b"False", b"True "),
        lambda h: h.replace(b", 8)", [b", 9)", b", 4)", b",-8)", b", 0)"][rng.integers(0, 4)]),
        lambda h: h.replace(b"shape", b"shapf"),
        lambda h: bytes(rng.permutation(np.frombuffer(h, np.uint8))),
        lambda h: b"(" * len(h),
        lambda h: b"9" * (len(h) - 1) + b"\n",
    ]
    header = bytes(data[start + 10 : start + 128])
    data[start + 10 : start + 128] = edits[int(rng.integers(0, len(edits)))](header)
    if rng.random() < 0.3:
        data[start + int(rng.integers(6, 10))] = int(rng.integers(0, 256))


def edit_json(data, rng):
    """Change the text of one JSON in place: another value, another type, no JSON at all."""
    starts = [i for i in range(0, len(data), 512) if data[i : i + 2] == b'{"']
    start = starts[int(rng.integers(0, len(starts)))]
    end = data.index(b"\0", start)
    body = bytes(data[start:end])
    edits = [
        lambda b: b.replace(b"zero", b"nine").replace(b"one", b"two").replace(b"e", b"o"),
        lambda b: b.replace(b'"text"', b'"texd"'),
        lambda b: b"[" * len(b),
        lambda b: b"1" * len(b),
        lambda b: b.replace(b": 1", b":-1").replace(b'"s', b'"z'),
        lambda b: b[: len(b) // 2] + b"\xff" * (len(b) - len(b) // 2),
        lambda b: (b'{"text": 5}' + b" " * len(b))[: len(b)],
        lambda b: (b'{"text": "x"}' + b"\0" * len(b))[: len(b)],
        lambda b: (b'{"text": "\\ud800"}' + b" " * len(b))[: len(b)],
    ]
    changed = edits[int(rng.integers(0, len(edits)))](body)
    assert len(changed) == len(body)
    data[start:end] = changed


class TooSlow(BaseException):
    pass


def within_limits(function):
    """Run it with an alarm: a hang is a failure, not a test run without an end."""

    def ring(*_):
        raise TooSlow

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS_A_CASE)
    try:
        return function()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def original(dataset, number):
    return next(sample for sample in SAMPLES if sample.key == dataset.key(number))


def check_sample(dataset, number):
    loaded = dataset.load(number)
    wanted = original(dataset, number)
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
                wanted = next(s for s in SAMPLES if s.key == name.split(":")[1])
                frames = int(inputs["frames"][row])
                np.testing.assert_array_equal(inputs["latents"][row, :frames], wanted.latents)
        return counted

    raised, counted = within_limits(strict), within_limits(lenient)
    assert raised == (counted != 0), (raised, counted)
    return raised


def copy_of(sound, folder, with_index):
    shutil.copytree(sound, folder)  # keeps times, so that the indexes stay fresh
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


def fuzz(sound, tmp_path, change, *, target="a.tar", keep_time=False, with_index=False, least=0.5):
    found = 0
    for seed in range(SEEDS_A_KIND):
        folder = copy_of(sound, tmp_path / str(seed), with_index)
        corrupt(folder / target, change, np.random.default_rng(seed), keep_time)
        found += outcome(folder)
    assert found >= least * SEEDS_A_KIND  # the corruption was corruption, and was found


@pytest.mark.parametrize("how", [*IN_PLACE, *RESIZING])
def test_tars_corrupt_before_they_are_indexed(sound, tmp_path, how):
    fuzz(sound, tmp_path, {**IN_PLACE, **RESIZING}[how])


def test_tar_headers(sound, tmp_path):
    def change(data, rng):
        flip_in_a_header(data, rng, sound / "a.tar")

    fuzz(sound, tmp_path, change, least=0.9)


@pytest.mark.parametrize("how", IN_PLACE)
def test_tars_corrupt_after_they_were_indexed(sound, tmp_path, how):
    fuzz(sound, tmp_path, IN_PLACE[how], keep_time=True, with_index=True, least=0.3)


@pytest.mark.parametrize("how", [edit_npy_header, edit_json])
def test_npy_headers_and_json(sound, tmp_path, how):
    fuzz(sound, tmp_path, how, least=0.9)


@pytest.mark.long
@pytest.mark.parametrize("how", [*IN_PLACE, *RESIZING])
def test_corrupt_indexes_are_made_again(sound, tmp_path, how):
    """An index is only a copy of what the tar says: corruption to it costs time and nothing else."""
    change = {**IN_PLACE, **RESIZING}[how]
    for seed in range(SEEDS_A_KIND):
        folder = copy_of(sound, tmp_path / str(seed), with_index=True)
        corrupt(folder / "b.tar.idx", change, np.random.default_rng(seed), keep_time=False)
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
    whole = (tmp_path / "a.tar").read_bytes().rstrip(b"\0")
    whole += bytes(-len(whole) % 512)
    info = tarfile.TarInfo("weights.npy")
    info.size = 64 << 30
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(whole + info.tobuf(tarfile.GNU_FORMAT) + b"\x93NUMPY\x01\0")
        file.truncate(len(whole) + 512 + info.size + 1024)  # sparse
    assert outcome(tmp_path)
