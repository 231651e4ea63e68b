"""The synthetic data of benchmark mode behind the real loader."""

import itertools

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests.helpers.benchmark_mode import config, loader_of
from torchtitan.models.dit_tts.config.job_config import Benchmark, Data
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatchSampler
from torchtitan.models.dit_tts.data.members import ArrayMember
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run.benchmark.synthetic import utterance_frames
from torchtitan.models.dit_tts.text.vocabulary import BYTE_VOCAB_SIZE


def test_lengths_are_log_normal_within_the_limits():
    frames = utterance_frames(
        Benchmark(mean_seconds=9.0, sigma=0.5), Data(), np.random.default_rng(0)
    )
    assert frames.min() >= 25 and frames.max() <= 768
    assert abs(frames.mean() / 25 - 9.0) < 0.15
    assert abs(np.log(frames).std() - 0.5) < 0.03
    two_seconds = Data(max_frames=50)
    few = utterance_frames(Benchmark(mean_seconds=9.0), two_seconds, np.random.default_rng(0))
    assert 25 <= few.min() < few.max() == 50  # 3 in 1,000 of the distribution
    for mean in (30.0, 0.1):
        with pytest.raises(InputError, match=f"mean_seconds = {mean}.*max_frames = 50.*choose a"):
            utterance_frames(Benchmark(mean_seconds=mean, sigma=0.2), two_seconds, None)


@pytest.mark.long
def test_batches_are_the_loaders_with_random_values(tmp_path):
    job = config(tmp_path)
    loader = loader_of(job)
    assert len(loader.policy.edges) == 3
    # Each is another utterance of the same distribution, cropped.
    dataset, lengths = loader.dataset, np.minimum(loader.dataset.frames, 64)
    references = dataset.reference_frames
    totals = [each.sum() for each in (dataset.frames, references, dataset.tokens)]
    assert (len(lengths), totals) == (20_000, [1352983, 1111001, 799492])  # as they always were
    assert sorted(references) == sorted(lengths) and (references != lengths).mean() > 0.1
    values = []
    for batch, labels in itertools.islice(loader, 10):
        valid = labels != IGNORE_INDEX
        assert (valid.sum(1) == batch["frames"]).all()
        assert not batch["latents"][~valid].any()
        text, speaker = (
            torch.arange(batch[name].shape[1]) < batch[count][:, None]
            for name, count in (("text_ids", "text_tokens"), ("speaker", "speaker_frames"))
        )
        assert not batch["speaker"][~speaker].any()
        values.append(batch["latents"][valid])
        ids = batch["text_ids"][text]
        assert ids.min() > 0 and ids.max() < BYTE_VOCAB_SIZE == job.encoder.vocab_size
        assert len(ids.unique()) > 20
    values = torch.cat(values)
    assert (values != 0).all() and abs(values.std() - 0.8) < 0.05


def test_another_array_of_the_samples_is_random_too(tmp_path, monkeypatch):
    level = ArrayMember("level", "level.npy", length="frames", entry="level", width=1)
    monkeypatch.setattr(members, "ARRAYS", (*members.ARRAYS, level))
    batch, labels = next(iter(loader_of(config(tmp_path))))
    valid = labels != IGNORE_INDEX
    assert batch["level"].shape == (*labels.shape, 1)
    assert batch["level"][valid].all() and not batch["level"][~valid].any()


def test_every_shape_comes_in_the_warm_up_and_then_the_order(tmp_path):
    job = config(tmp_path)
    loader = loader_of(job)
    shapes = [
        (batch["latents"].shape[1], batch["text_ids"].shape[1], batch["speaker"].shape[1])
        for batch, _ in itertools.islice(loader, 26)
    ]
    assert shapes[:6] == [shape for shape in reversed(loader.policy.shapes) for _ in range(2)]
    assert len(set(shapes[6:])) == 3 and shapes[6:12] != shapes[:6]
    assert job.training.steps == 6 + 5
    # Behind it the batches of real training, from its first one on and into its second epoch.
    order, given = loader.order, job.data
    inside = [np.flatnonzero(loader.policy.bucket_of(loader.dataset.frames) == n) for n in range(3)]
    plain = GlobalBatchSampler(inside, loader.policy.batch_sizes, given.seed)
    first_of_next = plain.batches_before_epoch(1)
    for number in (0, 1, 2, first_of_next - 1, first_of_next):
        expected, found = plain.batch(number), order.batch(6 + number)
        assert found.number == 6 + number
        assert (found.epoch, found.bucket) == (expected.epoch, expected.bucket)
        assert np.array_equal(found.samples, expected.samples)


def test_other_batches(tmp_path):
    """All of the longest; condition ids behind the text's."""
    longest = "--benchmark.lengths=longest", "--data.max_speaker_frames=192"  # above max_frames
    loader = loader_of(config(tmp_path, *longest))
    assert loader.policy.shapes == ((128, 64, 192),)
    batch, labels = loader.micro_batch(0)
    assert (labels == 0).all()
    assert (batch["text_tokens"] == 64).all() and (batch["speaker_frames"] == 192).all()

    job = config(tmp_path, "--data.conditioning=speaker,duration")
    ids = loader_of(job).micro_batch(0)[0]["text_ids"]
    assert job.encoder.vocab_size == BYTE_VOCAB_SIZE + 2
    assert (ids[:, :2] == torch.tensor([BYTE_VOCAB_SIZE, BYTE_VOCAB_SIZE + 1])).all()
    assert ids[:, 2:].max() < BYTE_VOCAB_SIZE
