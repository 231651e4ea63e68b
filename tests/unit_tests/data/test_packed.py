"""Packed batches: rows that all samples fill evenly, the same on any split, with the samples' own contents."""

from collections import Counter

import numpy as np
import pytest
from torchtitan.components.loss import IGNORE_INDEX

from tests.helpers.loaders import CHANNELS, SKIP, build, order_digest, samples_of, split, take
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data import row_loader
from torchtitan.models.dit_tts.data.batch_sampler import WEIGHT_BITS
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError
from torchtitan.models.dit_tts.data.packed_rows import PackedSampler, batch_policy
from torchtitan.models.dit_tts.data.references import WORDS
from torchtitan.models.dit_tts.text.aligner import choose_recordings, fit_aligner
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

PACKED = {"batching": "packed", "longest_per_row": 2, "max_speaker_frames": 64}


def speech(n, longest=750):
    """(n, 3) of 1 to 30 s at 25 frames/s; texts of a speaker's own rate, references of 1 to 10 s."""
    rng = np.random.default_rng(0)
    seconds = rng.lognormal(np.log(7), 0.6, n).clip(1, 30)
    rate = rng.uniform(12, 18, 500)[rng.integers(0, 500, n)]
    frames = np.ceil(seconds * 25).astype(int).clip(max=longest)
    return np.stack([frames, np.ceil(seconds * rate).astype(int), rng.integers(25, 251, n)], 1)


def order(lengths, seed=3, draws=None, global_batch=32, **changes):
    data = Data(batching="packed", max_text_tokens=600, **changes)
    frames, text, references = lengths.T
    policy = batch_policy(data, global_batch, frames, references, text, draws)
    return policy, PackedSampler(np.arange(len(lengths)) * 2, policy, seed, draws)


def rows_of(batch):
    return [batch.samples[a:b] for a, b in zip(batch.starts[:-1], batch.starts[1:])]


def test_an_epoch_has_every_sample_once_in_rows_that_are_full():
    lengths = speech(6000)
    policy, made = order(lengths)
    assert (policy.edges, policy.epochs, policy.batch_sizes) == ((3008,), 1, (8,))
    # References at most as long as their utterance, in blocks of 8 patches of 4 frames.
    limit = np.minimum(384, -(-lengths[:, 0] // 32) * 32)
    valid = np.stack([*lengths.T[:2], np.minimum(lengths[:, 2], limit)], 1)
    end, epochs = made.batches_before_epoch(1), []
    assert made.batches_before_epoch(2) == 2 * end and made.batches_per_epoch == end
    for epoch in range(2):
        batches = [made.batch(number) for number in range(epoch * end, (epoch + 1) * end)]
        rows = [row // 2 for batch in batches for row in rows_of(batch)]
        sums = np.array([valid[row].sum(0) for row in rows])
        assert {batch.epoch for batch in batches} == {epoch} and {b.rows for b in batches} == {8}
        assert (sums <= policy.shapes[0]).all() and max(map(len, rows)) <= policy.max_samples
        fractions = sums.sum(0) / (len(rows) * np.array(policy.shapes[0]))
        assert fractions.min() > 0.97, fractions
        stated = policy.useful_fraction, policy.useful_text_fraction
        assert fractions[:2].tolist() == pytest.approx(stated)
        assert sums.reshape(end, 8, 3).sum(1)[:, 0].std() < 0.01 * 8 * 3008
        epochs.append(np.concatenate(rows))
        assert sorted(epochs[-1].tolist()) == list(range(6000))
    assert (epochs[0] != epochs[1]).mean() > 0.99
    other = order(lengths)[1]
    assert other.batch(end).samples.tolist() == made.batch(end).samples.tolist()
    assert order(lengths[::-1])[1].samples_fingerprint() != other.samples_fingerprint()


def test_the_order_is_pinned():
    """A resume months later must find the same rows: these numbers may never change."""
    n = np.arange(600)
    lengths = np.stack([25 + n * 37 % 700, 10 + n * 37 % 700 // 4, 25 + n * 53 % 200], 1)
    policy, made = order(lengths, global_batch=8)
    assert (policy.shapes, policy.max_samples, policy.epochs) == (((2912, 760, 960),), 11, 1)
    assert order_digest(made, 200) == "b52b173a4fc864cc"
    assert made.samples_fingerprint() == "ff416a84ccd7980e"
    draws = np.linspace(1, 3 << WEIGHT_BITS, 600).astype(int)
    assert order_digest(order(lengths, 3, draws, 8)[1], 200) == "5529a01bca1549fb"
    assert order_digest(order(lengths[:40], global_batch=8)[1], 60) == "e53aec9b45c59ec1"


@pytest.mark.parametrize(
    "n, is_weighted, longest_per_row", [(1, False, 4), (3, True, 1), (40, True, 4), (700, True, 1)]
)
def test_few_and_weighted_samples_come_as_often_as_they_shall(n, is_weighted, longest_per_row):
    lengths = speech(n)
    draws = np.random.default_rng(1).integers(1, 3 << WEIGHT_BITS, n) if is_weighted else None
    policy, made = order(lengths, 3, draws, 8, longest_per_row=longest_per_row)
    often = np.ones(n) if draws is None else draws / (1 << WEIGHT_BITS)
    counts, begin = Counter(), 0
    for group in range(1, 4):
        end = made.batches_before_epoch(group * policy.epochs)
        for number in range(begin, end):
            batch = made.batch(number)
            counts.update(batch.samples.tolist())
            for row in rows_of(batch):
                assert (lengths[row // 2, :2].sum(0) <= policy.shapes[0][:2]).all()
        begin = end
        for sample in range(n):
            assert abs(counts[2 * sample] - group * policy.epochs * often[sample]) < 1


def test_what_fits_no_row_is_left_out_with_a_warning(monkeypatch):
    lines: list[str] = []
    lengths = speech(600)
    policy, made = order(lengths)
    monkeypatch.setattr("torchtitan.models.dit_tts.data.packed_rows._SWEEPS", 0)
    monkeypatch.setattr("torchtitan.models.dit_tts.data.packed_rows.logger.warning", lines.append)
    batches = map(made.batch, range(made.batches_before_epoch(policy.epochs)))
    rows = [row for batch in batches for row in rows_of(batch)]
    for row in rows:
        assert (lengths[row // 2, :2].sum(0) <= policy.shapes[0][:2]).all()
    total = 600 * policy.epochs
    lost = total - sum(map(len, rows))
    assert 0 < lost < 0.2 * total and lines[0].startswith(f"{lost} of {total} samples do not fit")


def test_contents_of_a_micro_batch(folder, monkeypatch):
    monkeypatch.setattr(row_loader, "_MAX_ALIGNED", 20)  # the others are aligned each time
    aligner = fit_aligner(choose_recordings(build(folder).dataset, 10**6))
    tokenizer = UnitTokenizer(Vocabulary(), aligner=aligner)
    loader = build(folder, ranks=2, rank=1, tokenizer=tokenizer, **PACKED)
    dataset, policy = loader.dataset, loader.policy
    (N, L, P), places = policy.shapes[0], 2 * policy.max_samples
    where = {dataset.sample_id(i): i for i in range(len(dataset))}
    cropped = 0
    for inputs, labels in take(loader, 12):
        batch = loader.order.batch(int(inputs["global_batch"]))
        first, n = int(batch.starts[2]), len(inputs["sample_id"])  # rank 1 has rows 2 and 3 of 4
        assert inputs["row"].tolist() == [*range(first, first + n)] + [0] * (places - n)
        assert int(inputs["global_batch_size"]) == len(batch.samples) == first + n
        assert inputs["longest"] == (168, int(tokenizer.max_tokens(dataset, (0, 1)).max()), 64)
        columns = {
            "latents": np.zeros((2 * N, CHANNELS), np.float32),
            "speaker": np.zeros((2 * P, CHANNELS), np.float32),
            "text_ids": np.full(2 * L, tokenizer.pad_id),
            "text_positions": np.full(2 * L, -1, np.float32),
        }
        f = t = r = 0
        for slot, sample_id in enumerate(inputs["sample_id"]):
            sample = where[sample_id]
            assert sample == batch.samples[first + slot]
            latents, reference = dataset.read(sample)
            most = min(64, -(-len(latents) // 32) * 32)
            if len(reference) > most:
                start = int(loader.order.crops(batch)[first + slot]) % (len(reference) - most + 1)
                reference, cropped = reference[start : start + most], cropped + 1
            text = dataset.metadata(sample)["text"]
            ids = np.array(tokenizer.encode(text))
            columns["latents"][f : f + len(latents)] = latents
            columns["speaker"][r : r + len(reference)] = reference
            columns["text_ids"][t : t + len(ids)] = ids
            placed = tokenizer.text_positions(text, aligner.frames(text, latents))
            columns["text_positions"][t : t + len(ids)] = placed
            found = [int(inputs[k][slot]) for k in ("frames", "text_tokens", "speaker_frames")]
            assert found == [len(latents), len(ids), len(reference)]
            f, t, r = f + len(latents), t + len(ids), r + -(-len(reference) // 4) * 4
        for name, wanted in columns.items():
            np.testing.assert_array_equal(inputs[name][0].numpy(), wanted, err_msg=name)
        for name in ("frames", "text_tokens", "speaker_frames"):
            assert len(inputs[name]) == places and not inputs[name][n:].any()
        assert labels[0].tolist() == [0] * f + [IGNORE_INDEX] * (2 * N - f)
    assert cropped > 5


def test_a_corrupt_sample_is_left_out(tmp_path):
    folder = make_shards(tmp_path, 120, seed=7, channels=CHANNELS)
    valid = split(folder, 1, 1, 12, **PACKED)
    flip_bits(folder / "000000.tar", [3 * 5, 3 * 20 + 1, 3 * 33 + 2])
    bad = {f"000000:utt0000{n}" for n in (10, 40, 66)}
    with pytest.raises(CorruptSampleError, match="utt0000"):
        take(build(folder, **PACKED), 12)
    batches = take(build(folder, **PACKED, **SKIP), 12)
    assert samples_of(batches) == [sample for sample in valid if sample[2] not in bad] != valid
    lost = sum(sample[2] in bad for sample in valid)
    assert sum(inputs["replaced"] for inputs, _ in batches) == lost
    for inputs, labels in batches:
        frames = int(inputs["frames"].sum())
        assert (labels[0, :frames] == 0).all() and not inputs["latents"][0, frames:].any()
        patches = int((-(-inputs["speaker_frames"] // 4) * 4).sum())
        assert not inputs["speaker"][0, patches:].any()


def test_drawn_references_fit_their_rows(folder):
    loader = build(folder, references="drawn", **PACKED)
    P, met, cut = loader.policy.shapes[0][2], 0, 0
    for inputs, _ in take(loader, 20):
        batch = loader.order.batch(int(inputs["global_batch"]))
        words = loader.order.reference_words(batch, WORDS).tolist()
        patches = -(-inputs["speaker_frames"] // 4) * 4
        starts = patches.cumsum(0) - patches
        for begin, end in zip(batch.starts[:-1], batch.starts[1:]):
            assert (used := int(patches[begin:end].sum())) <= P
            for slot in range(begin, end):
                sample, n = int(batch.samples[slot]), int(inputs["speaker_frames"][slot])
                most = min(64, -(-int(loader.dataset.frames[sample]) // 32) * 32)
                pieces = loader.references.draw(words[slot], sample, most)
                parts = [
                    loader.dataset.read(p.sample)[0][p.start : p.start + p.frames] for p in pieces
                ]
                drawn = np.concatenate(parts)
                found = inputs["speaker"][0, starts[slot] : starts[slot] + n].numpy()
                np.testing.assert_array_equal(found, drawn[:n])
                assert n == len(drawn) or used > P - 4 * (end - begin)
                met, cut = met + n, cut + (n < len(drawn))
    assert cut > 10 and met > 0.8 * 20 * 4 * P


def test_a_stored_reference_stands_in_for_a_corrupt_drawn_one(tmp_path):
    """It may be shorter than the drawn one was; the references behind it are the samples' own."""
    folder = make_shards(tmp_path, 120, seed=7, channels=CHANNELS)
    drawn = PACKED | {"references": "drawn"}

    def references(**more):
        return {
            sample[:3]: next(each[2] for each in sample[3][1:] if each[0] == "speaker")
            for sample in split(folder, 1, 1, 12, **drawn, **more)
        }

    valid = references()
    flip_bits(folder / "000000.tar", [3 * n for n in range(0, 40, 5)])  # latents
    whole, dataset = references(**SKIP), build(folder, **PACKED).dataset
    others = {place: found for place, found in whole.items() if valid[place] != found}
    number = {dataset.sample_id(n): n for n in range(len(dataset))}
    for (_, _, name), found in others.items():
        assert found in dataset.read(number[name])[1].astype(np.float32).tobytes()
    assert len(others) > 20
