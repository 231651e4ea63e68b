"""The pass over the data: what it measures, and of which samples."""

import numpy as np
import pytest

from tests.helpers.sound_samples import (
    CHANNELS,
    changed,
    raw_members,
    sound_samples,
    write_raw,
    write_shards,
)
from titan_tts.doctor import scan
from titan_tts.doctor.scan import choose_samples, measure
from torchtitan.models.dit_tts.data.dataset import open_dataset


def test_threads_and_chunks_change_nothing(tmp_path, monkeypatch):
    samples = sound_samples(40)
    samples[0].latents[:] += 3
    samples[1].latents[4, 2] = -20
    write_shards(tmp_path, samples)
    dataset = open_dataset(str(tmp_path), CHANNELS)
    monkeypatch.setattr(scan, "CHUNK_SAMPLES", 7)
    done = []
    one = measure(dataset, np.arange(40), 1, done.append)
    many = measure(dataset, np.arange(40), 4)
    assert sum(done) == 40
    np.testing.assert_array_equal(one.rows, many.rows)
    np.testing.assert_array_equal(one.channels.total, many.channels.total)
    arrays = [sample.latents.astype(np.float64) for sample in samples]
    np.testing.assert_allclose(one.rows["std"], [array.std() for array in arrays], rtol=1e-4)
    np.testing.assert_array_equal(one.rows["peak"], [np.abs(array).max() for array in arrays])
    latents = np.concatenate(arrays)
    np.testing.assert_allclose(one.channels.mean, latents.mean(0), atol=1e-9)
    np.testing.assert_allclose(one.channels.std, latents.std(0), rtol=1e-4)


def test_huge_float32_values_do_not_overflow(tmp_path):
    (sample,) = sound_samples(1)
    latents = sample.latents.astype(np.float32) * np.float32(1e30)
    write_raw(tmp_path / "x.tar", raw_members(changed(sample, latents=latents)))
    found = measure(open_dataset(str(tmp_path), CHANNELS), np.arange(1), 1)
    assert found.rows["std"][0] == pytest.approx(latents.astype(np.float64).std(), rel=1e-4)
    assert (choose_samples(1000, 100) // 10 == np.arange(100)).all()
    assert choose_samples(5, 0).tolist() == choose_samples(5, 9).tolist() == [0, 1, 2, 3, 4]
