"""Drawn references: the other utterances of the speaker, by the position alone; references that hold a part of their target."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.loaders import CHANNELS, SKIP, build, take
from tools.harness.synthetic import flip_bits, make_samples, make_shards
from torchtitan.models.dit_tts.data.leak import LEAK_FRAMES, is_leak
from torchtitan.models.dit_tts.data.references import (
    MAX_JOINED,
    MIN_FRAMES,
    WORDS,
    DrawnReferences,
    FixedReferences,
)
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError

DRAWN = {"references": "drawn"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Speakers of many samples, and sample 5 alone by its speaker and sample 6 by nobody known."""
    path = tmp_path_factory.mktemp("shards")
    samples = make_samples(80, seed=7, channels=CHANNELS)
    samples[5].metadata["speaker"] = "alone"
    del samples[6].metadata["speaker"]
    write_shard(path / "000000.tar", samples)
    return path


def test_draws():
    speakers = np.array([0, 1, 0, 0, 2, -1, 0, 1, 0, 0])
    frames = np.array([10, 60, 40, 50, 60, 70, 80, 90, 20, 99])
    hashes = np.array([7, 1, 2, 3, 4, 5, 7, 6, 8, 9], np.uint64)  # 6 is a copy of 0
    drawn = DrawnReferences(np.arange(9), speakers, frames, hashes)  # 9 is not used
    assert (drawn.samples_with_same_speaker, drawn.speakers) == (7, 2)
    generator = np.random.Generator(np.random.Philox(1))
    lengths, seen, numbers = [], set(), set()
    for _ in range(3000):
        words = generator.integers(2**63, size=WORDS).tolist()
        assert drawn.draw(words, 4, 60) == drawn.draw(words, 5, 60) == []
        assert {piece.sample for piece in drawn.draw(words, 7, 60)} == {1}
        pieces = drawn.draw(words, 6, 48)
        assert pieces == drawn.draw(words, 6, 48)
        assert len({piece.sample for piece in pieces}) == len(pieces)
        for number, piece in enumerate(pieces):
            end = piece.start + piece.frames
            assert piece.frames > 0 and end <= frames[piece.sample]
            # What is joined is consecutive: only the first begins, and only the last ends, within one.
            assert number == 0 or piece.start == 0
            assert number == len(pieces) - 1 or end == frames[piece.sample]
        seen |= {piece.sample for piece in pieces}
        numbers.add(len(pieces))
        lengths.append(sum(piece.frames for piece in pieces))
    assert seen == {2, 3, 8} and numbers == set(range(1, MAX_JOINED + 1))
    long = [length for length in lengths if length >= MIN_FRAMES]
    counts = np.bincount(long, minlength=49)[MIN_FRAMES:]
    assert min(lengths) == 20 and counts.min() > 60 and len(counts) == 49 - MIN_FRAMES
    # Of a speaker's other samples each is as frequent as the next.
    firsts = [drawn.draw([0, 0, 0, word, 0, 0], 3, 48)[0].sample for word in range(300)]
    assert sorted(firsts.count(each) for each in set(firsts)) == [100, 100, 100]


def test_contents_of_a_batch(folder):
    loader, stored = build(folder, **DRAWN), build(folder)
    dataset = loader.dataset
    where = {dataset.sample_id(i): i for i in range(len(dataset))}
    codes, _ = dataset.labels("speaker")
    assert [R for _, _, R in loader.policy.shapes][-1] == 48
    assert loader.order.samples_fingerprint() == stored.order.samples_fingerprint()
    met: dict[int, set[bytes]] = {}
    for inputs, _ in take(loader, 40):
        batch = loader.order.batch(int(inputs["global_batch"]))
        words = loader.order.reference_words(batch, WORDS)
        R = inputs["speaker"].shape[1]
        for row, sample_id in enumerate(inputs["sample_id"]):
            sample = where[sample_id]
            pieces = loader.references.draw(words[row].tolist(), sample, R)
            parts = [dataset.read(p.sample)[0][p.start : p.start + p.frames] for p in pieces]
            for piece in pieces:
                assert piece.sample != sample and codes[piece.sample] == codes[sample] >= 0
            if not pieces:
                assert sample in (5, 6)
                whole = dataset.read(sample)[1]
                start = int(loader.order.crops(batch)[row]) % max(1, len(whole) - R + 1)
                parts = [whole[start : start + R]]
            expected = np.concatenate(parts)
            n = len(expected)
            assert torch.equal(inputs["speaker"][row, :n], torch.from_numpy(expected))
            assert not inputs["speaker"][row, n:].any()
            assert inputs["speaker_frames"][row] == n
            met.setdefault(sample, set()).add(expected.tobytes())
    several = [len(references) for sample, references in met.items() if sample not in (5, 6)]
    assert np.mean(several) > 3  # another one nearly every time


def test_a_speaker_needs_two_utterances(tmp_path):
    samples = make_samples(20, channels=CHANNELS)
    for number, sample in enumerate(samples):
        sample.metadata["speaker"] = f"s{number}"
    write_shard(tmp_path / "000000.tar", samples)
    with pytest.raises(InputError, match="references = 'drawn', but no two samples have the same"):
        build(tmp_path, **DRAWN)


def test_references_of_several_speakers_are_taken_whole(tmp_path):
    samples = make_samples(20, channels=CHANNELS)
    for number, sample in enumerate(samples):
        sample.metadata["speaker"] = f"s{number % 5}"
        sample.metadata["reference_parts"] = [1, len(sample.reference) - 1]
    write_shard(tmp_path / "000000.tar", samples)
    longest = max(len(sample.reference) for sample in samples)
    whole = {"max_reference_ratio": 0.0, "max_speaker_frames": longest}
    found = {
        key: length
        for batch, _ in take(build(tmp_path, **whole), 20)
        for key, length in zip(batch["sample_id"], batch["speaker_frames"].tolist())
    }
    assert found == {f"000000:{sample.key}": len(sample.reference) for sample in samples}
    for changes in (whole | DRAWN, whole | {"max_speaker_frames": 4}, {"max_reference_ratio": 0.1}):
        with pytest.raises(InputError, match="joins recordings.*max_reference_ratio = 0 and"):
            take(build(tmp_path, **changes), 20)


def test_a_corrupt_utterance_leaves_the_stored_reference(tmp_path):
    """The other rows have what they had."""
    folder = make_shards(tmp_path / "d", 120, seed=7, channels=CHANNELS)
    valid = take(build(folder, **DRAWN), 30)
    flip_bits(folder / "000000.tar", [3 * 5])
    with pytest.raises(InputError, match="sample '000000:utt000010': its latents in"):
        take(build(folder, **DRAWN), 30)
    loader = build(folder, **DRAWN, **SKIP)
    dataset, order, changed = loader.dataset, loader.order, 0
    names = [dataset.sample_id(i) for i in range(120)]
    bad = names.index("000000:utt000010")
    for (left, _), (right, _) in zip(take(loader, 30), valid, strict=True):
        batch, R = order.batch(int(left["global_batch"])), left["speaker"].shape[1]
        words, crops = order.reference_words(batch, WORDS).tolist(), order.crops(batch).tolist()
        for row, sample in enumerate(batch.samples.tolist()):
            found = left["speaker"][row, : left["speaker_frames"][row]].numpy()
            if sample == bad:
                assert left["sample_id"][row] != right["sample_id"][row]
                instead = names.index(left["sample_id"][row])  # its reference is drawn for it
                pieces = loader.references.draw(words[row], instead, R)
                parts = [dataset.read(p.sample)[0][p.start : p.start + p.frames] for p in pieces]
                np.testing.assert_array_equal(found, np.concatenate(parts))
                continue
            assert left["sample_id"][row] == right["sample_id"][row]
            assert torch.equal(left["latents"][row], right["latents"][row])
            if bad in [p.sample for p in loader.references.draw(words[row], sample, R)]:
                whole, changed = dataset.read(sample)[1], changed + 1
                start = crops[row] % max(1, len(whole) - R + 1)
                np.testing.assert_array_equal(found, whole[start : start + R])
            else:
                assert torch.equal(left["speaker"][row], right["speaker"][row])
    assert changed > 2


def test_where_none_is_stored_training_says_so_and_fixed_ones_are_drawn(tmp_path):
    samples = [
        replace(sample, reference=sample.reference[:0])
        for sample in make_samples(24, seed=7, channels=CHANNELS)
    ]
    samples[5].metadata["speaker"] = "alone"
    write_shard(tmp_path / "000000.tar", samples)
    # The one that is too long for training has a stored one.
    too_long = make_samples(1, channels=CHANNELS, frames=lambda _: 201)
    write_shard(tmp_path / "000001.tar", too_long)
    with pytest.raises(InputError, match="no sample has a stored reference.*references = 'drawn'"):
        build(tmp_path)
    (tmp_path / "000001.tar").unlink()
    dataset = build(tmp_path, **DRAWN).dataset
    fixed, again = FixedReferences(dataset), FixedReferences(dataset)
    codes, _ = dataset.labels("speaker")
    chosen = set()
    for number in range(24):
        pieces = fixed.pieces(number, 40)
        assert pieces == again.pieces(number, 40) and len(pieces) == (number != 5)
        for piece in pieces:
            assert codes[piece.sample] == codes[number] and piece.sample != number
            assert piece.frames == min(40, dataset.frames[piece.sample])
            reference = fixed.load(number, dataset.load(number), 40)
            expected = dataset.load(piece.sample).latents[piece.start :][: piece.frames]
            assert np.array_equal(reference, expected)
            chosen.add(piece.sample)
    assert len(chosen) > 8


def frames_of(frames: int, seed: int = 0, channels: int = 8) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((frames, channels))
    return values.astype(np.float16).astype(np.float32)


def test_a_part_of_the_target_is_found_wherever_it_stands():
    latents, other, n = frames_of(60), frames_of(40, 1), LEAK_FRAMES
    silence, edge = np.tile(frames_of(1, 9), (40, 1)), frames_of(6, 8)
    quiet = np.concatenate([edge, silence, frames_of(50)])
    for parts, target, expected in (
        ([latents], latents, True),
        ([latents[:n], other], latents, True),
        ([other, latents[17 : 17 + n], other], latents, True),
        ([other, latents[60 - n :]], latents, True),
        ([other, latents[60 - n + 1 :]], latents, False),
        ([latents[:5], other, latents[5:9]], latents, False),
        ([latents[7:9]], latents, True),  # a short reference as a complete one
        ([latents[7:8], other[:1]], latents, False),
        ([latents[:5]], latents[:4], False),
        ([frames_of(0)], latents, False),
        ([edge, silence, other], quiet, False),  # digital silence, which all recordings share
        ([silence[:5]], quiet, False),
        ([latents[::-1]], latents, False),
        ([latents[::2]], latents, False),
        ([np.negative(-latents)], latents, True),
    ):
        assert is_leak(np.concatenate(parts), target) is expected
    minus = latents[:n].copy()
    minus[:, 3] = 0  # zeros have two signs, which encoders mix
    assert is_leak(np.where(minus == 0, np.float32(-0.0), minus), minus)
