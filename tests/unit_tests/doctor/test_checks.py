"""Every kind of fault is found in a dataset that has it, and none in a valid one."""

import json
import os

import numpy as np
import pytest

from tests.helpers.sound_samples import (
    CHANNELS,
    changed,
    flip_byte_unnoticed,
    raw_members,
    sound_samples,
    speech,
    write_raw,
    write_shards,
)
from titan_tts.doctor.checks import check_dataset, log_distance, repeats
from titan_tts.doctor.findings import Limits, all_kinds
from titan_tts.doctor.scan import choose_samples, measure
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.index import load_index


def examine(*paths, limits=Limits(), max_samples=0):
    """code -> finding"""
    dataset = open_dataset([str(path) for path in paths], CHANNELS, on_error="report")
    found = measure(dataset, choose_samples(len(dataset), max_samples), 2)
    return {finding.code: finding for finding in check_dataset(dataset, found, limits)}


def write_changed(folder, number, **changes):
    """Two valid shards but for one sample; returns that sample's id."""
    samples = sound_samples()
    samples[number] = changed(samples[number], **changes)
    write_shards(folder, samples)
    return f"shard-{number // 12:06d}:{samples[number].key}"


def record(folder, paths, **sizes):
    """A prepare.json above `folder`; `sizes` replace the shards' own, by shard name."""
    shards = {f"{folder.name}/{path.name}": {"bytes": path.stat().st_size} for path in paths}
    shards |= {f"{folder.name}/{name}.tar": {"bytes": size} for name, size in sizes.items()}
    (folder.parent / "prepare.json").write_text(json.dumps({"shards": shards}))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "out" / "train"
    path.mkdir(parents=True)
    return path


# ---- faults: functions of the folder that return where the first example must point


def cut_off(folder):
    path = write_shards(folder, sound_samples())[1]
    os.truncate(path, path.stat().st_size - 30_000)
    return str(path)


def without_reference(folder):
    first, second = sound_samples(2)
    members = raw_members(first) | raw_members(second)
    del members[f"{second.key}.ref.npy"]
    write_raw(folder / "x.tar", members)
    return f"x:{second.key}"


def second_of_two(spoil):
    def make(folder):
        first, second = sound_samples(2)
        spoil(second)
        write_raw(folder / "x.tar", raw_members(first) | raw_members(second))
        return f"x:{second.key}"

    return make


def set_nan(sample):
    sample.latents[3, 1] = np.nan


def flipped_after_indexing(folder):
    path = write_shards(folder, sound_samples())[0]
    index = load_index(str(path))
    flip_byte_unnoticed(path, int(index.columns["latents_offset"][5]) + 100)
    return "shard-000000:utt005"


def missing_shard(folder):
    paths = write_shards(folder, sound_samples())
    record(folder, paths)
    paths[1].unlink()
    return str(paths[1])


def shard_of_another_size(folder):
    paths = write_shards(folder, sound_samples())
    record(folder, paths, **{"shard-000000": paths[0].stat().st_size + 1})
    return str(paths[0])


def dead_channel(folder):
    samples = sound_samples()
    for sample in samples:
        sample.latents[:, 5] = 0.25
    write_shards(folder, samples)
    return "channel 5"


def same_latents(folder):
    first = sound_samples()[1]
    text, seconds = first.metadata["text"][::-1], len(first.latents) / 25
    metadata = {"target_duration": seconds, "text": text}
    return write_changed(folder, 20, latents=first.latents, metadata=metadata)


def same_text(folder):
    first = sound_samples()[0]
    # Another recording, near enough in length to be said at the same speed.
    frames = len(first.latents) + 2
    return write_changed(
        folder,
        18,
        latents=speech(np.random.default_rng(1), frames),
        metadata={"text": first.metadata["text"], "target_duration": frames / 25},
    )


def one_sample(number, change):
    """`change(sample)` -> what replaces it in the sample of this number."""
    return lambda folder: write_changed(folder, number, **change(sound_samples()[number]))


def metadata(number, **changes):
    return one_sample(number, lambda sample: {"metadata": changes})


def spike(sample):
    sample.latents[10, 3] = 20
    return {"latents": sample.latents}


FAULTS = {
    "corrupt_shard": cut_off,
    "incomplete_sample": without_reference,
    "not_finite": second_of_two(set_nan),
    "unusable_sample": second_of_two(lambda sample: sample.metadata.pop("text")),
    "corrupt_sample": flipped_after_indexing,
    "shard_missing": missing_shard,
    "shard_changed": shard_of_another_size,
    "zero_latents": one_sample(7, lambda _: {"latents": np.zeros((60, CHANNELS))}),
    "constant_latents": one_sample(
        7, lambda _: {"latents": np.tile(np.linspace(-1, 1, CHANNELS), (60, 1))}
    ),
    "constant_reference": one_sample(13, lambda _: {"reference": np.zeros((20, CHANNELS))}),
    "std_outlier": one_sample(2, lambda sample: {"latents": sample.latents / 4}),
    "peak_outlier": one_sample(2, spike),
    "constant_channel": dead_channel,
    "chars_per_second_outlier": metadata(4, text="hm"),
    "empty_text": metadata(4, text=" \n"),
    "long_text": metadata(4, text="long " * 60),
    "long_latents": one_sample(4, lambda _: {"latents": speech(np.random.default_rng(1), 800)}),
    "duration_mismatch": metadata(9, target_duration=99.0),
    "bad_duration": metadata(9, target_duration="2 s"),
    "duplicate_latents": same_latents,
    "reference_from_target": one_sample(3, lambda one: {"reference": one.latents[10:40]}),
    "duplicate_text": same_text,
    "single_utterance_speaker": metadata(6, speaker="once"),
    "no_speaker": metadata(6, speaker=None),
    "no_duration": metadata(6, target_duration=None),
    "no_reference": one_sample(6, lambda _: {"reference": np.zeros((0, CHANNELS))}),
}
# Faults that cannot come alone.
ALSO = {
    "long_text": {"chars_per_second_outlier"},
    "long_latents": {"chars_per_second_outlier", "duration_mismatch"},
    "empty_text": {"chars_per_second_outlier"},
    "zero_latents": {"chars_per_second_outlier", "duration_mismatch"},
    "constant_latents": {"chars_per_second_outlier", "duration_mismatch"},
    # Of two samples, each speaker has one.
    "incomplete_sample": {"single_utterance_speaker"},
    "not_finite": {"single_utterance_speaker"},
    "unusable_sample": {"single_utterance_speaker"},
}


def test_every_kind_has_a_test():
    assert set(FAULTS) | {"heldout_in_training"} == set(all_kinds())


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_fault_is_found(code, folder):
    where = FAULTS[code](folder)
    findings = examine(folder)
    assert findings[code].count == 1
    assert findings[code].examples[0].where == where
    assert findings[code].examples[0].detail
    assert set(findings) - {code} <= ALSO.get(code, set())


def test_valid_dataset_has_no_finding(folder):
    paths = write_shards(folder, sound_samples())
    record(folder, paths)
    assert examine(folder) == {}
    # One shard of two is complete in itself.
    assert examine(paths[0]) == {} == examine(folder, max_samples=6)
    (folder / "prepare.json").write_text("{")
    assert examine(folder) == {}


def test_reference_named_after_its_own_sample(folder):
    """A reference encoded again from the same recording has other bytes, but its key is known."""
    where = write_changed(folder, 3, metadata={"reference_keys": ["utt009", "utt003"]})
    findings = examine(folder)
    assert list(findings) == ["reference_from_target"]
    assert findings["reference_from_target"].examples[0].where == where
    write_changed(folder, 3, reference=sound_samples()[3].latents)  # the complete target
    assert list(examine(folder)) == ["reference_from_target"]


def test_an_empty_reference_is_no_leak(folder):
    nothing = np.zeros((0, CHANNELS))
    write_changed(folder, 3, reference=nothing, metadata={"reference_key": "utt003"})
    assert list(examine(folder)) == ["no_reference"]


def test_a_leak_is_an_error():
    assert all_kinds()["reference_from_target"].severity == "error"
    assert all_kinds()["heldout_in_training"].severity == "error"


def test_a_held_out_sample_that_is_trained_on(folder):
    samples = sound_samples()
    held = folder.parent / "dev-clean"
    write_shards(folder, samples[:16])
    write_shards(held, [*samples[16:], changed(samples[5], key="again")])
    for paths in ((folder, held), (held, folder)):
        finding = examine(*paths)["heldout_in_training"]
        assert finding.count == 1
        [example] = finding.examples
        assert example.where == "dev-clean/shard-000001:again"
        assert example.detail == "the latents of train/shard-000000:utt005"
    # Two parts of one kind are nobody's leak.
    assert list(examine(folder)) == [] and list(examine(held)) == []
    held.rename(folder.parent / "train2")
    assert "heldout_in_training" not in examine(folder, folder.parent / "train2")


def test_two_languages_of_different_speed_are_each_compared_with_itself(folder):
    samples = sound_samples()
    for number in range(4):
        seconds = samples[number].metadata["target_duration"]
        text = samples[number].metadata["text"][: round(3.5 * seconds)]
        samples[number] = changed(samples[number], metadata={"text": text, "language": "zh"})
    write_shards(folder, samples)
    assert examine(folder) == {}
    for sample in samples:
        del sample.metadata["language"]
    write_shards(folder, samples)
    assert examine(folder, limits=Limits(examples=3))["chars_per_second_outlier"].count == 4
    assert len(examine(folder, limits=Limits(examples=3))["chars_per_second_outlier"].examples) == 3


def test_wrong_frame_rate_names_the_right_one(folder):
    write_shards(folder, sound_samples())
    finding = examine(folder, limits=Limits(frames_per_second=50))["duration_mismatch"]
    assert finding.count == 24
    assert "the median sample has 25 per second" in finding.examples[0].detail


def test_text_limit_counts_the_tokenizers_unit(folder):
    limits = {"max_text_tokens": 80, "outlier_sigmas": 100}
    write_changed(folder, 4, metadata={"text": "你好世界" * 10})  # 40 characters, 120 bytes
    assert list(examine(folder, limits=Limits(**limits))) == ["long_text"]
    assert examine(folder, limits=Limits(**limits, text_unit="chars")) == {}


def test_what_reaches_a_limit_is_within_it_and_the_worst_comes_first(folder):
    samples = sound_samples()
    write_shards(folder, samples)
    frames = max(len(sample.latents) for sample in samples)
    tokens = max(len(sample.metadata["text"]) for sample in samples) + 2  # begin and end
    assert examine(folder, limits=Limits(max_frames=frames, max_text_tokens=tokens)) == {}
    above = examine(folder, limits=Limits(max_frames=frames - 1, max_text_tokens=tokens - 1))
    assert set(above) == {"long_latents", "long_text"}

    finding = examine(folder, limits=Limits(max_frames=60, examples=1))["long_latents"]
    longest = max(samples, key=lambda sample: len(sample.latents))
    assert finding.count == sum(len(sample.latents) > 60 for sample in samples) > 1
    assert [example.where.split(":")[1] for example in finding.examples] == [longest.key]


@pytest.mark.parametrize("missed, found", [(1.9, False), (2.1, True)])
def test_a_duration_may_miss_two_frames(folder, missed, found):
    """One that rounding takes, and one that the limits allow."""
    seconds = sound_samples()[9].metadata["target_duration"]
    write_changed(folder, 9, metadata={"target_duration": seconds + missed / 25})
    assert list(examine(folder)) == ["duration_mismatch"] * found


def test_the_same_text_by_another_speaker_is_no_copy(folder):
    write_changed(folder, 4, metadata={"text": sound_samples()[3].metadata["text"]})
    assert "duplicate_text" not in examine(folder)


def test_log_distance_has_a_floor_and_follows_the_spread():
    values = np.array([1.0, 1.0, 1.0, 1.0, 1.9])
    distance, limit, centre = log_distance(values, values > 0, 5.0, 2.0)
    assert centre == 1 and limit == pytest.approx(np.log(2)) and (distance < limit).all()
    wide = np.exp(np.random.default_rng(0).normal(0, 1, 10_000))
    _, limit, _ = log_distance(wide, wide > 0, 5.0, 2.0)
    assert limit == pytest.approx(5, rel=0.05)


def test_repeats():
    again, first = repeats(np.array([7, 3, 7, 3, 9, 7], np.uint64))
    assert again.tolist() == [2, 3, 5] and first.tolist() == [0, 1, 0, 1, 4, 0]
    again, first = repeats(np.array([7, 7, 7], np.uint64), np.array([1, 2]))
    assert again.tolist() == [2] and first[2] == 1
