"""The doctor's findings of texts beside their recordings, and training's warnings of the same."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.sound_samples import CHANNELS, sound_samples, write_shards
from titan_tts.doctor.checks import check_dataset
from titan_tts.doctor.findings import Limits
from titan_tts.doctor.scan import choose_samples, measure
from torchtitan.models.dit_tts import train_spec
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import open_dataset

FEW = "texts_not_compared"


def examine(folder):
    """code -> finding"""
    dataset = open_dataset(str(folder), CHANNELS, on_error="report")
    measured = measure(dataset, choose_samples(len(dataset), 0), 2)
    return {one.code: one for one in check_dataset(dataset, measured, Limits())}


def spoken_list(generator, count, words):
    """(texts, frames): 1.1 to 1.9 frames a letter by the letter, a rate of its own for each text."""
    texts, frames = [], []
    for _ in range(count):
        sizes = generator.integers(2, 9, generator.integers(*words))
        said = ["".join(generator.choice(list("abcdefghi"), size)) for size in sizes]
        length = sum(1 + (ord(letter) - 96) / 10 for letter in "".join(said))
        texts.append(" ".join(said))
        frames.append(int(length * np.exp(generator.normal(0, 0.08)) + generator.integers(5, 15)))
    return texts, frames


def write_list(folder, texts, frames):
    template, samples = sound_samples()[0], []
    for number, (text, count) in enumerate(zip(texts, frames, strict=True)):
        latents = np.random.default_rng(number).standard_normal((count, CHANNELS))
        metadata = {**template.metadata, "text": text, "target_duration": count / 25}
        given = {"latents": latents.astype(np.float16), "metadata": metadata}
        samples.append(replace(template, key=f"{number:03d}", **given))
    write_shards(folder, samples)


@pytest.mark.parametrize("shift", [0, 1])
def test_training_and_doctor_judge_a_list_alike(tmp_path, monkeypatch, shift):
    """With its own texts, and with those of the following rows."""
    texts, frames = spoken_list(np.random.default_rng(5), 300, (4, 15))
    write_list(tmp_path / "train", texts[shift:] + texts[:shift], frames)
    assert ("texts_of_others" in examine(tmp_path / "train")) == bool(shift)
    config, warnings = JobConfig(), []
    config.data.path, config.data.latent_channels = str(tmp_path / "train"), CHANNELS
    config.job.dump_folder = str(tmp_path / "run")
    monkeypatch.setattr(train_spec.logger, "warning", warnings.append)
    train_spec._ready_durations(config)
    assert len(warnings) == shift and all("titan-tts data doctor" in line for line in warnings)


def test_training_from_weights_starts_from_their_lengths(tmp_path):
    """A letter that the new texts lack takes the time that it took before."""
    base = tmp_path / "base"
    write_list(tmp_path / "train", *spoken_list(np.random.default_rng(5), 40, (4, 15)))
    (base / "checkpoint" / "step-1").mkdir(parents=True)
    (base / "tokenizer.json").write_text("{}")
    per_byte = np.ones(257)
    (base / "durations.json").write_text(
        json.dumps({"weights": per_byte.tolist(), "speaker_scale": {}})
    )
    config = JobConfig()
    config.data.path, config.data.latent_channels = str(tmp_path / "train"), CHANNELS
    config.job.dump_folder = str(tmp_path / "run")
    config.checkpoint.initial_load_path = str(base / "checkpoint" / "step-1")
    train_spec._ready_durations(config)
    weights = json.loads((tmp_path / "run" / "durations.json").read_text())["weights"]
    assert weights[ord("a")] != 1.0 and weights[ord("z")] == pytest.approx(1.0, abs=0.5)


def test_numbers_are_short_texts_of_long_speech(tmp_path):
    """Right texts, of which those with a number have fewer characters and more frames."""
    generator = np.random.default_rng(0)
    texts = ["ab " * int(generator.integers(10, 14)) for _ in range(75)]
    numbers = ["ab " * int(generator.integers(2, 6)) + "1234567890" for _ in range(75)]
    frames = [len(text) for text in texts] + [len(text) + 60 for text in numbers]
    write_list(tmp_path, texts + numbers, frames)
    assert not {"texts_of_others", FEW} & set(examine(tmp_path))


@pytest.mark.parametrize("count, words", [(20, 12), (100, 1)])
def test_texts_that_cannot_be_compared(tmp_path, count, words):
    """Few sentences, or single words: neither right nor wrong ones can be told, and the doctor says so."""
    generator = np.random.default_rng(1)
    texts, frames = spoken_list(generator, count, (words, words + 1))
    write_list(tmp_path, texts[1:] + texts[:1], frames)
    found = examine(tmp_path)
    assert "texts_of_others" not in found
    [example] = found[FEW].examples
    assert example.where == "language 'en'" and example.detail.startswith(f"{count} texts")
