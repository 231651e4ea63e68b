"""The pass over the data, and the statistics from the indexes alone."""

from collections import Counter

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
from titan_tts.doctor.page import inspect_page
from titan_tts.doctor.scan import choose_samples, measure
from titan_tts.doctor.summary import distribution, summarize
from torchtitan.models.dit_tts.data.dataset import open_dataset


def test_threads_and_chunks_change_nothing(tmp_path, monkeypatch):
    samples = sound_samples(40)
    samples[0].latents[:] += 3
    samples[1].latents[4, 2] = -20
    write_shards(tmp_path, samples)
    dataset = open_dataset(str(tmp_path), CHANNELS)
    monkeypatch.setattr(scan, "CHUNK_SAMPLES", 7)
    done = []
    one, many = measure(dataset, np.arange(40), 1, done.append), measure(dataset, np.arange(40), 4)
    assert done == [7] * 5 + [5]
    np.testing.assert_array_equal(one.rows, many.rows)
    arrays = [sample.latents.astype(np.float64) for sample in samples]
    np.testing.assert_allclose(one.rows["std"], [array.std() for array in arrays], rtol=1e-4)
    np.testing.assert_array_equal(one.rows["peak"], [np.abs(array).max() for array in arrays])


def test_huge_float32_values_do_not_overflow(tmp_path):
    (sample,) = sound_samples(1)
    latents = sample.latents.astype(np.float32) * np.float32(1e30)
    write_raw(tmp_path / "x.tar", raw_members(changed(sample, latents=latents)))
    found = measure(open_dataset(str(tmp_path), CHANNELS), np.arange(1), 1)
    assert found.rows["std"][0] == pytest.approx(latents.astype(np.float64).std(), rel=1e-4)
    assert (choose_samples(1000, 100) // 10 == np.arange(100)).all()
    assert choose_samples(250, 100)[-1] >= 247  # a part that is no whole number of samples
    assert choose_samples(5, 0).tolist() == choose_samples(5, 9).tolist() == [0, 1, 2, 3, 4]


def test_summary_of_known_data(tmp_path):
    """24 samples in two shards, and one more in float32 behind a sample without text."""
    samples = sound_samples(26)
    raw = changed(samples.pop(), latents=samples[0].latents.astype(np.float32))
    del samples[0].metadata["speaker"]
    samples[1].metadata["quality"] = 3
    samples[2] = changed(samples[2], reference=np.zeros((0, CHANNELS)))
    nameless = changed(samples.pop(), metadata={"text": None})
    paths = [*write_shards(tmp_path / "a", samples), tmp_path / "b.tar"]
    write_raw(paths[-1], raw_members(nameless) | raw_members(raw))
    samples.append(raw)
    given = [str(tmp_path / "a"), str(tmp_path / "b.tar")]
    dataset = open_dataset(given, CHANNELS, on_error="report")
    summary = summarize(dataset, given, 12.5, top=2)
    exact = {"path": given, "fingerprint": dataset.fingerprint, "samples": 25, "shards": 3}
    exact |= {"bytes": sum(path.stat().st_size for path in paths), "latent_channels": CHANNELS}
    exact |= {"frames_per_second": 12.5, "problems": 1}
    assert {name: summary[name] for name in exact} == exact
    frames = [len(sample.latents) for sample in samples]
    assert summary["hours"] == pytest.approx(sum(frames) / 12.5 / 3600)
    assert summary["reference_hours"] == pytest.approx(24 * 30 / 12.5 / 3600)
    assert summary["frames"]["quantiles"]["0.5"] == np.median(frames)
    references = summary["reference_frames"]
    assert (references["min"], references["max"], references["without"]) == (30, 30, 1)
    texts = [len(sample.metadata["text"]) for sample in samples]
    rates = [12.5 * text / length for text, length in zip(texts, frames, strict=True)]
    assert summary["chars_per_second"]["max"] == pytest.approx(max(rates))

    speaker, hours, spoken = summary["labels"]["speaker"], Counter(), Counter()
    assert (speaker["count"], speaker["without"]) == (3, 1)
    for sample in samples[1:]:
        hours[sample.metadata["speaker"]] += len(sample.latents) / 12.5 / 3600
        spoken[sample.metadata["speaker"]] += 1
    for row, (name, wanted) in zip(speaker["most"], hours.most_common(2), strict=True):
        assert row["value"] == name and row["samples"] == spoken[name]
        expected = wanted, wanted / hours.total()
        assert (row["hours"], row["fraction"]) == pytest.approx(expected)
    assert summary["labels"]["quality"]["most"][0]["value"] == "3"
    # The same on a terminal, and what is not listed counted.
    said = [" ".join(line.split()) for line in inspect_page(summary).text().split("\n")]
    for words in (
        "references 0.016 hours, 1 samples without",
        "speaker: 3 different, 1 samples without samples hours fraction",
        "1 more (--top lists more)",
        "problems in the shards: 1; titan-tts data doctor lists them",
    ):
        assert words in said


def test_distribution_by_hand():
    found = distribution(np.arange(101)[::-1])
    percents = [int(100 * float(fraction) + 0.5) for fraction in found["quantiles"]]
    assert percents == list(found["quantiles"].values()) == [1, 5, 25, 50, 75, 95, 99]
    assert (found["min"], found["max"], found["mean"]) == (0, 100, 50)
    assert distribution(np.zeros(0))["mean"] is None
