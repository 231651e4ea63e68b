"""Indexes of shards: used while they fit, rebuilt when stale or corrupt, in the cache of a read-only folder; and of
another table of members, whose one line is all that another array needs."""

import errno
import os
import shutil
import struct
import tarfile

import numpy as np
import pytest
import torch
import xxhash

from tests.helpers.loaders import CHANNELS, build, take
from tools.harness.synthetic import flip_bits, make_samples, make_shards
from torchtitan.models.dit_tts.data import index, members
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.members import ArrayMember
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard


def test_index_is_used_and_rebuilt_when_stale_or_corrupt(tmp_path, monkeypatch):
    make_shards(tmp_path, 4, channels=CHANNELS, shards=1)
    tar, sidecar = str(tmp_path / "000000.tar"), tmp_path / "000000.tar.idx"
    built = []
    build = index.build_index
    monkeypatch.setattr(index, "build_index", lambda source: built.append(source) or build(source))
    first = open_dataset(tar, CHANNELS)
    stored = sidecar.read_bytes()
    again = open_dataset(tar, CHANNELS)
    assert len(built) == 1 and again.fingerprint == first.fingerprint
    assert again.sample_id(3) == first.sample_id(3)

    corrupt = (b"", stored[:-1], stored[:-1] + b"?", b"OTHER" + stored[5:])
    for bad in corrupt:
        sidecar.write_bytes(bad)
        assert open_dataset(tar, CHANNELS).fingerprint == first.fingerprint
        assert sidecar.read_bytes() == stored
    assert len(built) == 1 + len(corrupt)

    write_shard(tar, make_samples(3, seed=5, channels=CHANNELS))
    changed = open_dataset(tar, CHANNELS)
    assert len(changed) == 3 and changed.fingerprint != first.fingerprint
    os.utime(tar, ns=(1, 1))
    assert open_dataset(tar, CHANNELS).fingerprint == changed.fingerprint
    assert len(built) == 7


def forged(stored, change):
    """An index with another column or other extras, and the right checksum."""
    content = bytearray(stored[16:])
    samples, keys = struct.unpack_from("<QQ", content, 40)
    columns = np.frombuffer(content, members.index_dtype(), samples, 56)
    at = 56 + columns.nbytes + keys
    if isinstance(change, bytes):
        del columns
        content[at:] = change
    else:
        columns[change[0]][1] = change[1]
    return stored[:8] + xxhash.xxh3_64_digest(bytes(content)) + bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        *(("frames", 2**30), ("reference_frames", -1), ("latents_offset", -1), ("key_end", 2**40)),
        *(("metadata_bytes", 2**30), ("speaker_code", 99), ("latents_item_bytes", 0)),
        *(b"[" * 10**5, b"[]", b'{"labels": 3}', b"{" + b'"a":{' * 500 + b"}" * 501),
    ],
)
def test_an_index_of_a_stranger_is_made_again(tmp_path, change):
    make_shards(tmp_path, 4, channels=CHANNELS, shards=1)
    tar, sidecar = str(tmp_path / "000000.tar"), tmp_path / "000000.tar.idx"
    first = open_dataset(tar, CHANNELS)
    stored = sidecar.read_bytes()
    sidecar.write_bytes(forged(stored, change))
    again = open_dataset(tar, CHANNELS)
    assert again.fingerprint == first.fingerprint and sidecar.read_bytes() == stored
    assert [again.metadata(sample) for sample in range(4)]


def test_a_keys_dots_go_up_only_alone(tmp_path, monkeypatch):
    """A folder vol..1 is stored as it may be written; .. is no folder of a key."""
    array = np.ones((9, CHANNELS), np.float32)
    tar, sidecar = tmp_path / "s.tar", tmp_path / "s.tar.idx"
    keys = ("vol..1/u1", "vol..1/..x/u2")
    write_shard(
        tar, [Triplet(key, array, array[:3] * (n + 2), {"text": "a"}) for n, key in enumerate(keys)]
    )
    first, built, real = open_dataset(str(tar), CHANNELS), [], index.build_index
    monkeypatch.setattr(index, "build_index", lambda source: built.append(0) or real(source))
    assert open_dataset(str(tar), CHANNELS).fingerprint == first.fingerprint and not built
    stored = sidecar.read_bytes()
    for known, other in ((b"vol..1/..x/u2", b"vol..1x/../u2"), (b"vol..1/u1", b"../vol/u1")):
        content = stored[16:].replace(known, other)
        sidecar.write_bytes(stored[:8] + xxhash.xxh3_64_digest(content) + content)
        open_dataset(str(tar), CHANNELS)
        assert built.pop() == 0 and sidecar.read_bytes() == stored


def test_processes_that_start_together_begin_with_other_shards(tmp_path, monkeypatch):
    """And find the same dataset."""
    make_shards(tmp_path, 10, channels=CHANNELS, shards=5)
    opened, load = [], index.load_index
    monkeypatch.setattr(index, "load_index", lambda path: opened.append(path) or load(path))
    monkeypatch.setattr(index, "_LOCAL_OPENERS", 1)
    parts = [open_dataset(str(tmp_path), CHANNELS, part=(number, 2)) for number in range(2)]
    assert [int(path[-5]) for path in opened] == [0, 1, 2, 3, 4] + [2, 3, 4, 0, 1]
    for sample in range(10):
        assert parts[0].sample_id(sample) == parts[1].sample_id(sample)
    assert parts[0].fingerprint == parts[1].fingerprint


def test_derived_columns_belong_to_the_contents_of_a_tar(tmp_path):
    tar = str(make_shards(tmp_path, 4, channels=CHANNELS, shards=1) / "000000.tar")
    made = index.load_index(tar).digest
    assert index.load_column(tar, made, "tokens-a") is None
    counts = np.array([3, 1, 4, 1], np.int32)
    index.save_column(tar, made, "tokens-a", counts)
    stored = tmp_path / "000000.tar.idx.tokens-a"
    np.testing.assert_array_equal(
        index.load_column(tar, index.load_index(tar).digest, "tokens-a"), counts
    )
    assert index.load_column(tar, made, "tokens-b") is None
    for bad in (b"", stored.read_bytes()[:-1] + b"?"):
        stored.write_bytes(bad)
        assert index.load_column(tar, made, "tokens-a") is None
    index.save_column(tar, made, "tokens-a", counts)
    write_shard(tar, make_samples(4, seed=5, channels=CHANNELS))
    assert index.load_column(tar, index.load_index(tar).digest, "tokens-a") is None


def test_read_only_folder_uses_the_cache(tmp_path, monkeypatch):
    folder = make_shards(tmp_path / "d", 4, channels=CHANNELS, shards=1)
    write_atomic = index.write_atomic

    def refuse(path, content):  # as a read-only disk does; permissions do not bind root
        if os.path.dirname(path) == str(folder):
            raise OSError(errno.EROFS, "read-only")
        write_atomic(path, content)

    monkeypatch.setattr(index, "write_atomic", refuse)
    dataset = open_dataset(str(folder), CHANNELS)
    tar = str(folder / "000000.tar")
    index.save_column(tar, index.load_index(tar).digest, "tokens-a", np.arange(4))
    assert index.load_column(tar, index.load_index(tar).digest, "tokens-a").tolist() == [0, 1, 2, 3]
    assert os.listdir(folder) == ["000000.tar"]
    monkeypatch.setattr(index, "build_index", None)  # must not be needed
    assert open_dataset(str(folder), CHANNELS).fingerprint == dataset.fingerprint


def test_fingerprint_is_of_contents_not_of_place_or_time(tmp_path):
    first = make_shards(tmp_path / "a", 6, seed=1, channels=CHANNELS)
    shutil.copytree(first, tmp_path / "b", copy_function=shutil.copy)
    make_shards(tmp_path / "c", 6, seed=2, channels=CHANNELS)
    fingerprints = [open_dataset(str(tmp_path / name), CHANNELS).fingerprint for name in "abc"]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    (first / "000000.tar").rename(first / "renamed.tar")
    assert open_dataset(str(first), CHANNELS).fingerprint != fingerprints[0]
    digests = set()
    for text in ("one", "two"):  # of the same length in a tar of the same size
        sample = Triplet("a", np.zeros((3, CHANNELS)), np.ones((2, CHANNELS)), {"text": text})
        (tmp_path / text).mkdir()
        write_shard(tmp_path / text / "x.tar", [sample])
        digests.add(open_dataset(str(tmp_path / text), CHANNELS).fingerprint)
    # Checkpoints record it: if it changed, every resume would be refused.
    assert len(digests) == 2 and "2c19b3d394efdc54" in digests


def f0_of(sample) -> np.ndarray:
    """(T, 1), different for every sample."""
    return sample.latents[:, :1] + np.float16(1)


@pytest.fixture
def samples(monkeypatch):
    """60 samples with a value per latent frame besides their latents and reference."""
    f0 = ArrayMember("f0", "f0.npy", length="frames", entry="f0", width=1)
    monkeypatch.setattr(members, "ARRAYS", (*members.ARRAYS, f0))
    made = make_samples(60, seed=7, channels=CHANNELS)
    for sample in made:
        sample.other_arrays["f0"] = f0_of(sample)
    return {f"a:{sample.key}": sample for sample in made}


def test_a_line_in_the_table_brings_an_array_from_the_tar_to_the_batch(tmp_path, samples):
    write_shard(tmp_path / "a.tar", samples.values())
    for inputs, labels in take(build(tmp_path), 12):
        assert inputs["f0"].dtype == torch.float32
        assert inputs["f0"].shape == (*labels.shape, 1)
        for row, sample_id in enumerate(inputs["sample_id"]):
            frames = int(inputs["frames"][row])
            np.testing.assert_array_equal(inputs["f0"][row, :frames], f0_of(samples[sample_id]))
            assert not inputs["f0"][row, frames:].any()


def test_an_index_of_another_table_is_made_anew(tmp_path, samples, monkeypatch):
    write_shard(tmp_path / "a.tar", samples.values())
    with monkeypatch.context() as patch:
        patch.setattr(members, "ARRAYS", members.ARRAYS[:-1])
        assert len(open_dataset(str(tmp_path), CHANNELS).load(0).arrays) == len(members.ARRAYS)
    f0 = open_dataset(str(tmp_path), CHANNELS).load(0).arrays[-1]
    np.testing.assert_array_equal(f0, f0_of(samples["a:utt000000"]))


def test_the_array_is_checked_like_the_others(tmp_path, samples):
    tar, chosen = tmp_path / "a.tar", samples["a:utt000003"]
    for array, words in ((f0_of(chosen)[:-1], "f0 of .* has .* rows for"), (None, "has no f0")):
        chosen.other_arrays.update(f0=array) if array is not None else chosen.other_arrays.pop("f0")
        with pytest.raises(ValueError, match=words):
            write_shard(tar, samples.values())
    chosen.other_arrays["f0"] = f0_of(chosen)
    write_shard(tar, samples.values())
    with tarfile.open(tar) as file:
        names = file.getnames()
    dataset = open_dataset(str(tmp_path), CHANNELS)
    flip_bits(tar, [names.index("utt000003.f0.npy")])
    with pytest.raises(CorruptSampleError, match="'a:utt000003': its f0 in .* changed after"):
        dataset.load(3)
    (tmp_path / "a.tar.idx").unlink()
    with pytest.raises(ValueError, match="the .f0.npy of sample 'utt000003' is not as it was"):
        open_dataset(str(tmp_path), CHANNELS)
