"""Shards: what is written is read back, whatever tool wrote the tar; corruption is always an error."""

import dataclasses
import io
import os
import shutil
import subprocess
import tarfile

import numpy as np
import pytest

from tests.helpers.sentences import refused
from tests.helpers.sound_samples import raw_members
from tests.helpers.tars import npy, write_tar
from tools.harness.synthetic import flip_bits, make_samples, make_shards
from torchtitan.models.dit_tts.data import dataset as dataset_module
from torchtitan.models.dit_tts.data import extents, index
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.shard_writer import HASHES_KEY, Triplet, write_shard

CHANNELS = 8


def check_equal(dataset, samples, prefix="x:"):
    assert [dataset.sample_id(i) for i in range(len(dataset))] == [
        prefix + sample.key for sample in samples
    ]
    for number, sample in enumerate(samples):
        latents, reference = dataset.read(number)
        np.testing.assert_array_equal(latents, sample.latents.astype(np.float32))
        np.testing.assert_array_equal(reference, sample.reference.astype(np.float32))
        metadata = dataset.metadata(number)
        metadata.pop(HASHES_KEY, None)  # only our own writer adds it
        assert metadata == sample.metadata
        assert dataset.frames[number] == len(sample.latents)
        assert dataset.text_chars[number] == len(sample.metadata["text"])
        assert dataset.text_bytes[number] == len(sample.metadata["text"].encode())


@pytest.fixture
def samples():
    made = make_samples(5, seed=1, channels=CHANNELS)
    made[2].metadata["text"] = "naïve 你好"
    return made


def test_a_shard_has_deterministic_bytes_and_a_failed_write_leaves_the_old_one(tmp_path, samples):
    write_shard(tmp_path / "x.tar", iter(samples))
    first = (tmp_path / "x.tar").read_bytes()
    write_shard(tmp_path / "x.tar", samples)
    assert (tmp_path / "x.tar").read_bytes() == first
    with pytest.raises(ValueError, match="key 'utt000000' was given twice"):
        write_shard(tmp_path / "x.tar", [samples[0], samples[0]])
    assert (tmp_path / "x.tar").read_bytes() == first
    assert os.listdir(tmp_path) == ["x.tar"]
    check_equal(open_dataset(str(tmp_path), CHANNELS), samples)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"key": "a.b"}, "key 'a.b' cannot name a sample"),
        ({"latents": np.zeros((0, CHANNELS), np.float16)}, "0 latent frames; .* at least one"),
        ({"latents": np.full((3, CHANNELS), 1e6)}, "not finite in float16"),
        ({"reference": np.zeros((3, CHANNELS + 1), np.float16)}, "same width"),
        ({"metadata": {"text": "a", "x": float("nan")}}, "cannot be written as "),
        ({"metadata": {"text": 1}}, 'has no "text" string'),
        ({"key": "a/../b"}, "cannot name a sample"),
    ],
)
def test_writer_refuses(tmp_path, samples, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        write_shard(tmp_path / "x.tar", [Triplet(**{**vars(samples[0]), **change})])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_python_tars_with_long_names_interleaved_and_extra_members(
    tmp_path, samples, tar_format, monkeypatch
):
    if tar_format == tarfile.GNU_FORMAT:  # members too far apart for one read
        monkeypatch.setattr(extents, "_MAX_GAP_BYTES", 0)
    # ustar splits a long name into a prefix and a name of at most 100 bytes.
    samples = [
        dataclasses.replace(sample, key=f"{'folder' * 12}/{'k' * 80}{number}")
        for number, sample in enumerate(samples)
    ]
    if tar_format != tarfile.USTAR_FORMAT:
        samples.append(dataclasses.replace(samples[0], key="é" * 140))
    members = [list(raw_members(sample).items()) for sample in samples]
    interleaved = [triplet[kind] for kind in (2, 0, 1) for triplet in members]
    interleaved.insert(4, ("readme.txt", b"not a sample"))
    interleaved.insert(9, (samples[0].key + ".wav", b"RIFF"))
    write_tar(tmp_path / "x.tar", interleaved, tar_format)
    check_equal(open_dataset(str(tmp_path), CHANNELS), samples)


@pytest.mark.parametrize("tar_format", ["ustar", "gnu", "posix", "v7"])
def test_tars_of_gnu_tar(tmp_path, samples, tar_format):
    """The arrays have any version of npy, and some members are named in capitals."""
    (tmp_path / "source").mkdir()
    for number, sample in enumerate(samples):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, sample.latents, version=(1 + number % 3, 0))
        members = raw_members(sample) | {f"{sample.key}.npy": buffer.getvalue()}
        for name, data in members.items():
            name = name.replace(".json", ".JSON") if number % 2 else name
            (tmp_path / "source" / name).write_bytes(data)
    # "-C folder ." writes a folder member and names that begin with "./".
    pack = ["tar", f"--format={tar_format}", "--sort=name", "-cf", tmp_path / "x.tar"]
    subprocess.run([*pack, "-C", tmp_path / "source", "."], check=True)
    check_equal(open_dataset(str(tmp_path / "x.tar"), CHANNELS), samples)


def test_float32_arrays_and_given_buffers(tmp_path, samples):
    rng = np.random.default_rng(0)
    sample = dataclasses.replace(samples[0], latents=rng.random((90, CHANNELS), np.float32))
    # Above 32,767 elements they are converted in parts.
    many = dataclasses.replace(samples[1], latents=rng.random((9000, CHANNELS)).astype(np.float16))
    write_tar(tmp_path / "x.tar", [*raw_members(sample).items(), *raw_members(many).items()])
    dataset = open_dataset(str(tmp_path / "x.tar"), CHANNELS)
    latents = np.full((300, CHANNELS), 7, np.float32)
    reference = np.full((3, CHANNELS), 7, np.float16)
    read_latents, read_reference = dataset.load(0, [latents, reference]).arrays
    assert np.shares_memory(read_latents, latents)
    np.testing.assert_array_equal(read_latents, sample.latents)
    assert (latents[90:] == 7).all()
    np.testing.assert_array_equal(read_reference, sample.reference[:3])
    cropped = dataset.load(0, [np.empty((5, CHANNELS), np.float32), reference]).latents
    np.testing.assert_array_equal(cropped, sample.latents[:5])
    np.testing.assert_array_equal(dataset.read(1)[0], many.latents.astype(np.float32))


FIFTH = 5120  # where the header of utt000001.ref.npy begins


def without_end(data):
    """Members alone, in blocks of 512 bytes."""
    return data[: -(-len(data.rstrip(b"\0")) // 512) * 512]


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize(
    "corrupt, sentence",
    [
        (without_end, "without an end-of-archive marker"),
        (lambda data: without_end(data) + bytes(512), "only part of the end-of-archive marker"),
        (lambda data: data[: FIFTH + 612], "'utt000001.ref.npy' should end before byte"),
        (lambda data: flipped(data, FIFTH + 3), "header at byte 5120: bad checksum"),
        (
            lambda data: data[:FIFTH] + bytes(512) + data[FIFTH + 512 :],
            "data follow a zero block",
        ),
        (lambda data: data + data, "joined by cat"),
        (lambda data: b"\x1f\x8b\x08" + data[3:], "not a plain tar"),
    ],
)
def test_corruption_is_one_sentence_naming_the_tar(tmp_path, samples, corrupt, sentence):
    path = tmp_path / "x.tar"
    write_shard(path, samples)
    path.write_bytes(corrupt(path.read_bytes()))
    refused(lambda: open_dataset(str(tmp_path), CHANNELS), "x.tar: ", sentence)


@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"-77777777777", b"0x000000010\0", b"1_000000000\0", b"\xff" * 12]
)
def test_sizes_that_no_tar_has(tmp_path, samples, size):
    """With a checksum that agrees: a negative one must not be an endless loop."""
    write_shard(tmp_path / "x.tar", samples)
    written = (tmp_path / "x.tar").read_bytes()
    for start, left in ((0, 0), (FIFTH, 1)):
        data = bytearray(written)
        data[start + 124 : start + 136], data[start + 148 : start + 156] = size, b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
        (tmp_path / "x.tar").write_bytes(data)
        refused(lambda: open_dataset(str(tmp_path), CHANNELS), "x.tar: ")
        assert len(open_dataset(str(tmp_path), CHANNELS, on_error="report")) == left


def replaced(samples, name, data):
    """Members of the samples with other bytes for one, or without it where these are None."""
    members = {n: d for sample in samples for n, d in raw_members(sample).items()} | {name: data}
    return [(n, d) for n, d in members.items() if d is not None]


GOOD = np.zeros((4, CHANNELS), np.float16)
ONE_VALUE = np.eye(4, CHANNELS, 2, bool) & (np.arange(4) == 3)[:, None]


@pytest.mark.parametrize(
    "suffix, data, sentence",
    [
        ("npy", npy(np.array([[{}]], dtype=object)), "'utt000001.npy' has dtype '|O'; only"),
        ("npy", npy(GOOD.astype(">f2")), "has dtype '>f2'"),
        ("npy", npy(np.zeros((CHANNELS, 4), np.float16).T), "fortran_order True"),
        ("npy", npy(GOOD[0]), "has shape (8,)"),
        ("npy", npy(GOOD)[:-1], "npy header (shape (4, 8)) needs"),
        ("npy", b"\x93NUMPY\1\0\x10\0{'descr': junk\n  ", "is not an npy array"),
        ("npy", npy(np.where(ONE_VALUE, np.float16("nan"), GOOD)), "are NaN or infinite"),
        ("npy", npy(np.where(ONE_VALUE, np.float32("-inf"), GOOD)), "are NaN or infinite"),
        ("npy", npy(GOOD[:0]), "sample 'utt000001' has no latent frame"),
        ("npy", npy(GOOD[:, :-1]), "the .npy of sample 'utt000001' is 7 wide, but 8"),
        ("ref.npy", npy(GOOD[:, :-1]), "the .ref.npy of sample 'utt000001' is 7 wide, but 8"),
        ("ref.npy", None, "sample 'utt000001' is incomplete, it lacks .ref.npy"),
        ("json", b'{"text": "\xff"}', "member 'utt000001.json'"),
        ("json", b'{"words": 1}', 'is not a UTF-8 JSON object with a "text"'),
    ],
)
def test_unusable_members_are_one_sentence(tmp_path, samples, suffix, data, sentence):
    write_tar(tmp_path / "x.tar", replaced(samples, f"utt000001.{suffix}", data))
    refused(lambda: open_dataset(str(tmp_path), CHANNELS), "x.tar: ", sentence)


def test_other_unusable_tars(tmp_path, samples):
    """Others are in integration_tests/test_hostile_inputs.py."""
    tar = tmp_path / "x.tar"
    write_shard(tar, samples)
    write_shard(tmp_path / "y.tar", make_samples(2, channels=CHANNELS - 1))
    refused(lambda: open_dataset(str(tmp_path), CHANNELS), "y.tar: its latents are 7 wide")
    refused(lambda: open_dataset(str(tar)), "latent_channels = 128; set it to 8")
    refused(lambda: write_shard(tar, []), "no samples were given")


def test_paths(tmp_path):
    folder = make_shards(tmp_path / "d", 6, channels=CHANNELS, shards=3)
    (tmp_path / "e").mkdir()
    shutil.copy(folder / "000000.tar", tmp_path / "e")
    both = open_dataset(str(tmp_path / "[de]" / "*.tar"), CHANNELS)
    assert [both.sample_id(0), both.sample_id(2)] == ["d/000000:utt000000", "e/000000:utt000000"]
    two = open_dataset([str(tmp_path / "e"), str(folder)], CHANNELS)
    assert two.source.tolist() == [0] * 2 + [1] * 6 and two.sample_id(2) == "d/000000:utt000000"
    for path, words in (
        ([str(folder), str(folder / "000000.tar")], "/d/000000.tar twice"),
        (str(tmp_path / "{d,d}" / "000000.tar"), "/d/000000.tar twice"),
        ([], "path is empty"),
    ):
        refused(lambda: open_dataset(path, CHANNELS), words)


def test_shard_that_changes_during_a_run(tmp_path, monkeypatch):
    make_shards(tmp_path, 4, channels=CHANNELS, shards=1)
    tar, read_shard = tmp_path / "000000.tar", index.read_shard
    with monkeypatch.context() as patch:
        patch.setattr(index, "read_shard", lambda source: os.utime(tar) or read_shard(source))
        refused(lambda: open_dataset(str(tmp_path), CHANNELS), "changed while it was being indexed")
    unread, dataset = (open_dataset(str(tmp_path), CHANNELS) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: os.read(-1, 1))
        with pytest.raises(CorruptSampleError, match=r"utt000000': .* cannot be read at .* \(Bad"):
            unread.read(0)
    tar.write_bytes(tar.read_bytes()[:-512])
    refused(lambda: dataset.read(0), "000000.tar: has ", "must not change during a run")


@pytest.mark.parametrize(
    "part, name, sentence",
    [
        (0, "latents", "the .npy of sample 'utt000001' is not as it was"),
        (1, "reference", "the .ref.npy of sample 'utt000001' is not as it was"),
        (2, "JSON", "'utt000001.json' is not a UTF-8 JSON object"),
    ],
)
def test_a_bit_that_flips_before_or_after_indexing_is_noticed(
    tmp_path, samples, part, name, sentence
):
    write_shard(tmp_path / "x.tar", samples)
    dataset = open_dataset(str(tmp_path), CHANNELS)
    flip_bits(tmp_path / "x.tar", [3 + part])
    dataset.read(0)
    for read in (dataset.load, *([dataset.metadata] if name == "JSON" else [])):
        with pytest.raises(CorruptSampleError, match=f"'x:utt000001': its {name} in .*changed"):
            read(1)
    (tmp_path / "x.tar.idx").unlink()
    refused(lambda: open_dataset(str(tmp_path), CHANNELS), sentence)


def test_skip_keeps_the_valid_samples(tmp_path, samples):
    """Only samples before a corrupt header of a tar are read."""
    many = make_samples(40, seed=3, channels=CHANNELS)
    write_shard(tmp_path / "good.tar", samples)
    write_tar(tmp_path / "x.tar", replaced(many, "utt000007.ref.npy", npy(GOOD)[:-1]))
    with tarfile.open(tmp_path / "x.tar") as tar:
        header = tar.getmembers()[96].offset  # of utt000032.npy
    (tmp_path / "x.tar").write_bytes(flipped((tmp_path / "x.tar").read_bytes(), header))
    dataset = open_dataset(str(tmp_path), CHANNELS, on_error="skip", max_corrupt_fraction=0.1)
    keys = [dataset.key(i) for i in range(len(samples), len(dataset))]
    assert keys == [s.key for s in many[:32] if s.key != "utt000007"]
    assert {tar for tar, _ in dataset.problems} == {str(tmp_path / "x.tar")}
    assert [problem.key for _, problem in dataset.problems] == ["utt000007", ""]
    refused(lambda: open_dataset(str(tmp_path), CHANNELS), "utt000007.ref.npy", "(1 more: ")
    with pytest.raises(ValueError, match="2 corrupt samples and 36 valid ones are 5.3%"):
        open_dataset(str(tmp_path), CHANNELS, on_error="skip", max_corrupt_fraction=0.05)


def test_labels_and_characters(tmp_path, samples, monkeypatch):
    for sample, speaker in zip(samples, ("b", "a", 7, None, "a")):
        sample.metadata["speaker"] = speaker
    write_shard(tmp_path / "x.tar", samples[:3])
    write_shard(tmp_path / "y.tar", samples[3:])
    monkeypatch.setattr(dataset_module, "MAX_OPEN_SHARDS", 1)
    dataset = open_dataset(str(tmp_path), CHANNELS)
    codes, values = dataset.labels("speaker")
    assert [values[c] if c >= 0 else None for c in codes] == ["b", "a", "7", None, "a"]
    codes, values = dataset.labels("language")
    assert [values[code] for code in codes] == ["en", "de", "en", "en", "de"]
    assert dataset.labels("quality")[0].tolist() == [-1] * 5
    for number in (0, 3, 0, 4):
        np.testing.assert_array_equal(dataset.read(number)[0], samples[number].latents)
        assert dataset._file.cache_info().currsize == 1
    assert dataset.characters == "".join(
        sorted(set("".join(sample.metadata["text"] for sample in samples)))
    )
