"""Statistics from the indexes alone."""

import json

import numpy as np
import pytest

from tests.helpers.sound_samples import CHANNELS, sound_samples, write_shards
from titan_tts.doctor.summary import distribution, summarize
from torchtitan.models.dit_tts.data.dataset import open_dataset


def test_summary_of_known_data(tmp_path):
    samples = sound_samples()
    del samples[0].metadata["speaker"]
    samples[1].metadata["quality"] = 3
    paths = write_shards(tmp_path, samples)
    dataset = open_dataset(str(tmp_path), CHANNELS)
    summary = summarize(dataset, ["set"], 25.0, top=2)
    frames = [len(sample.latents) for sample in samples]
    assert summary["samples"] == 24 and summary["shards"] == 2
    assert summary["bytes"] == sum(path.stat().st_size for path in paths)
    assert summary["hours"] == pytest.approx(sum(frames) / 25 / 3600)
    assert summary["frames"]["min"] == min(frames) and summary["frames"]["total"] == sum(frames)
    assert summary["frames"]["quantiles"]["0.5"] == np.median(frames)
    assert sum(summary["frames"]["histogram"]["counts"]) == 24
    assert summary["reference_frames"]["max"] == 30 and summary["reference_frames"]["without"] == 0
    assert summary["text_chars"]["total"] == sum(len(one.metadata["text"]) for one in samples)
    speaker = summary["labels"]["speaker"]
    assert speaker["count"] == 3 and speaker["without"] == 1
    assert len(speaker["most"]) == 2 and len(speaker["least"]) == 1
    named = speaker["most"] + speaker["least"]
    assert sum(row["samples"] for row in named) == 23
    hours = dict.fromkeys(("s0", "s1", "s2"), 0.0)
    for sample in samples[1:]:
        hours[sample.metadata["speaker"]] += len(sample.latents) / 25 / 3600
    ranked, total = sorted(hours.items(), key=lambda item: -item[1]), sum(hours.values())
    assert [row["value"] for row in named] == [name for name, _ in ranked]
    for row, (_, wanted) in zip(named, ranked, strict=True):
        assert (row["hours"], row["fraction"]) == pytest.approx((wanted, wanted / total))
    assert summary["labels"]["quality"]["most"][0]["value"] == "3"
    assert summary["fingerprint"] == dataset.fingerprint
    json.dumps(summary, allow_nan=False)


def test_distribution_by_hand():
    found = distribution(np.arange(101)[::-1])
    percents = [int(100 * float(fraction) + 0.5) for fraction in found["quantiles"]]
    assert percents == list(found["quantiles"].values()) == [1, 5, 25, 50, 75, 95, 99]
    assert (found["total"], found["min"], found["max"], found["mean"]) == (5050, 0, 100, 50)
    assert distribution(np.zeros(0))["mean"] is None
    zeros = distribution(np.zeros(3, np.int32))
    assert zeros["max"] == 0 and sum(zeros["histogram"]["counts"]) == 3
