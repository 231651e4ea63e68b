"""The member table: a line in it is all that another array needs."""

import tarfile

import numpy as np
import pytest
import torch

from tests.helpers.loaders import CHANNELS, build, take
from tools.harness.synthetic import flip_bits, make_samples
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.members import ArrayMember
from torchtitan.models.dit_tts.data.shard_writer import write_shard


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
