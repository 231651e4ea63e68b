"""The doctor: every kind of fault is found in an archive that has it, and none in a sound one."""

import hashlib
import json
import os

import fsspec
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
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.doctor.checks import Limits, all_findings, log_distance, repeats
from torchtitan.models.dit_tts.doctor.findings import KINDS
from torchtitan.models.dit_tts.doctor.scan import READ, choose_samples, measure
from torchtitan.models.dit_tts.doctor.shard_records import find_records, record_findings
from torchtitan.models.dit_tts.errors import InputError

# How a code's archive is made: folder -> where its first example must point.
FAULTS = {}


def fault(code):
    def keep(make):
        FAULTS[code] = make
        return make

    return keep


def examine(path, limits=Limits(), threads=2, max_samples=0):
    """code -> finding, as the command puts them together."""
    dataset = open_dataset(str(path), CHANNELS, on_error="report")
    found = measure(dataset, choose_samples(len(dataset), max_samples, 0), threads)
    records, missing = find_records(dataset.tar_paths)
    shard_findings, _ = record_findings(
        records, missing, threads=threads, with_digests=True, max_examples=limits.max_examples
    )
    findings = all_findings(dataset, found, limits, shard_findings)
    return {finding.kind.code: finding for finding in findings}


def write_changed(folder, number, **changes):
    """A sound archive of two shards but for one sample; returns that sample's id."""
    samples = sound_samples()
    samples[number] = changed(samples[number], **changes)
    write_shards(folder, samples)
    return f"shard-{number // 12:06d}:{samples[number].key}"


def record(folder, paths, **changes):
    """A prepare.json above ``folder``; ``changes`` replace entries, by shard name."""
    shards = {
        f"{folder.name}/{path.name}": {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    }
    shards.update(changes)
    (folder.parent / "prepare.json").write_text(json.dumps({"shards": shards}))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "train"


def test_sound_archive_has_no_finding(folder):
    record(folder, write_shards(folder, sound_samples()))
    assert examine(folder) == {}


@fault("damaged_shard")
def cut_off(folder):
    path = write_shards(folder, sound_samples())[1]
    os.truncate(path, path.stat().st_size - 30_000)
    return str(path)


@fault("incomplete_sample")
def without_reference(folder):
    first, second = sound_samples(2)
    folder.mkdir(parents=True)
    members = raw_members(first) | raw_members(second)
    del members[f"{second.key}.ref.npy"]
    write_raw(folder / "x.tar", members)
    return f"x:{second.key}"


@fault("not_finite")
def with_nan(folder):
    first, second = sound_samples(2)
    second.latents[3, 1] = np.nan
    folder.mkdir(parents=True)
    write_raw(folder / "x.tar", raw_members(first) | raw_members(second))
    return f"x:{second.key}"


@fault("unusable_sample")
def without_text(folder):
    first, second = sound_samples(2)
    del second.metadata["text"]
    folder.mkdir(parents=True)
    write_raw(folder / "x.tar", raw_members(first) | raw_members(second))
    return f"x:{second.key}"


@fault("damaged_sample")
def flipped_after_indexing(folder):
    path = write_shards(folder, sound_samples())[0]
    index = load_index(str(path))
    flip_byte_unnoticed(path, int(index.columns["latents_offset"][5]) + 100)
    return "shard-000000:utt005"


@fault("shard_missing")
def missing_shard(folder):
    paths = write_shards(folder, sound_samples())
    record(folder, paths)
    paths[1].unlink()
    return str(paths[1])


@fault("shard_changed")
def changed_shard(folder):
    paths = write_shards(folder, sound_samples())
    size = paths[0].stat().st_size
    record(folder, paths, **{"train/shard-000000.tar": {"bytes": size, "sha256": "0" * 64}})
    return str(paths[0])


@fault("zero_latents")
def zero_latents(folder):
    return write_changed(folder, 7, latents=np.zeros((60, CHANNELS)))


@fault("constant_latents")
def constant_latents(folder):
    frame = np.linspace(-1, 1, CHANNELS)
    return write_changed(folder, 7, latents=np.tile(frame, (60, 1)))


@fault("constant_reference")
def constant_reference(folder):
    return write_changed(folder, 13, reference=np.zeros((20, CHANNELS)))


@fault("std_outlier")
def quiet(folder):
    latents = sound_samples()[2].latents
    return write_changed(folder, 2, latents=latents / 4)


@fault("peak_outlier")
def spike(folder):
    latents = sound_samples()[2].latents
    latents[10, 3] = 20
    return write_changed(folder, 2, latents=latents)


@fault("constant_channel")
def dead_channel(folder):
    samples = sound_samples()
    for sample in samples:
        sample.latents[:, 5] = 0.25
    write_shards(folder, samples)
    return "channel 5"


@fault("chars_per_second_outlier")
def text_of_another(folder):
    return write_changed(folder, 4, metadata={"text": "hm"})


@fault("empty_text")
def empty_text(folder):
    return write_changed(folder, 4, metadata={"text": " \n"})


@fault("long_text")
def long_text(folder):
    return write_changed(folder, 4, metadata={"text": "long " * 60})


@fault("long_latents")
def long_latents(folder):
    return write_changed(folder, 4, latents=speech(np.random.default_rng(1), 800))


@fault("duration_mismatch")
def wrong_duration(folder):
    seconds = sound_samples()[9].metadata["target_duration"]
    return write_changed(folder, 9, metadata={"target_duration": seconds + 0.2})


@fault("bad_duration")
def bad_duration(folder):
    return write_changed(folder, 9, metadata={"target_duration": "2 s"})


@fault("duplicate_latents")
def same_latents(folder):
    samples = sound_samples()
    frames = len(samples[1].latents)
    text = samples[1].metadata["text"][::-1]
    samples[20] = changed(
        samples[20],
        latents=samples[1].latents,
        metadata={"target_duration": frames / 25, "text": text},
    )
    write_shards(folder, samples)
    return "shard-000001:utt020"


@fault("duplicate_keys")
def same_key(folder):
    return write_changed(folder, 20, key="utt001").replace("utt020", "utt001")


@fault("reference_from_target")
def own_crop(folder):
    return write_changed(folder, 3, reference=sound_samples()[3].latents[10:40])


@fault("duplicate_text")
def same_text(folder):
    samples = sound_samples()
    # Another recording, near enough in length to be said at the same speed.
    frames = len(samples[0].latents) + 2
    samples[18] = changed(
        samples[18],
        latents=speech(np.random.default_rng(1), frames),
        metadata={"text": samples[0].metadata["text"], "target_duration": frames / 25},
    )
    write_shards(folder, samples)
    return "shard-000001:utt018"


@fault("single_utterance_speaker")
def one_utterance(folder):
    return write_changed(folder, 6, metadata={"speaker": "once"})


@fault("no_speaker")
def no_speaker(folder):
    return write_changed(folder, 6, metadata={"speaker": None})


@fault("no_duration")
def no_duration(folder):
    return write_changed(folder, 6, metadata={"target_duration": None})


@fault("no_reference")
def no_reference(folder):
    return write_changed(folder, 6, reference=np.zeros((0, CHANNELS)))


# Faults that cannot come alone.
ALSO = {
    "shard_changed": set(),
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
    assert set(FAULTS) == set(KINDS)


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_fault_is_found(code, folder):
    where = FAULTS[code](folder)
    findings = examine(folder)
    assert findings[code].count == 1
    assert findings[code].examples[0].where == where
    assert findings[code].examples[0].detail
    assert set(findings) - {code} <= ALSO.get(code, set())


def test_reference_named_after_its_own_sample(folder):
    """A reference encoded anew from the same recording has other bytes; its key tells."""
    where = write_changed(folder, 3, metadata={"reference_keys": ["utt009", "utt003"]})
    findings = examine(folder)
    assert list(findings) == ["reference_from_target"]
    assert findings["reference_from_target"].examples[0].where == where


def test_reference_that_is_the_whole_target(folder):
    write_changed(folder, 3, reference=sound_samples()[3].latents)
    assert list(examine(folder)) == ["reference_from_target"]


def test_damage_before_indexing_is_found_by_the_hash_in_the_json(folder):
    path = write_shards(folder, sound_samples())[0]
    index = load_index(str(path))
    flip_byte_unnoticed(path, int(index.columns["reference_offset"][5]) + 100)
    os.unlink(f"{path}.idx")
    findings = examine(folder)
    assert list(findings) == ["damaged_sample"]
    assert findings["damaged_sample"].examples[0].where == "shard-000000:utt005"


def test_nothing_sound_is_left(folder):
    (sample,) = sound_samples(1)
    del sample.metadata["text"]
    folder.mkdir(parents=True)
    write_raw(folder / "x.tar", raw_members(sample))
    assert list(examine(folder)) == ["unusable_sample"]


def test_two_languages_of_different_speed_are_each_compared_with_itself(folder):
    samples = sound_samples()
    for number in range(4):
        seconds = samples[number].metadata["target_duration"]
        text = samples[number].metadata["text"][: round(3.5 * seconds)]
        metadata = {"text": text, "language": "zh"}
        samples[number] = changed(samples[number], metadata=metadata)
    write_shards(folder, samples)
    assert examine(folder) == {}
    for sample in samples:
        del sample.metadata["language"]
    write_shards(folder, samples)
    assert examine(folder)["chars_per_second_outlier"].count == 4


def test_absolute_limits_of_speech_rate(folder):
    write_shards(folder, sound_samples())
    limits = Limits(min_chars_per_second=20, max_examples=3)
    finding = examine(folder, limits)["chars_per_second_outlier"]
    assert finding.count == 24 and len(finding.examples) == 3
    assert examine(folder, Limits(min_chars_per_second=10, max_chars_per_second=20)) == {}


def test_wrong_frame_rate_names_the_right_one(folder):
    write_shards(folder, sound_samples())
    finding = examine(folder, Limits(frames_per_second=50))["duration_mismatch"]
    assert finding.count == 24
    assert "the median sample has 25 a second" in finding.examples[0].detail


def test_text_limit_counts_the_tokenizers_unit(folder):
    limits = {"max_text_tokens": 80, "outlier_sigmas": 100}
    write_changed(folder, 4, metadata={"text": "你好世界" * 10})  # 40 characters, 120 bytes
    assert list(examine(folder, Limits(**limits))) == ["long_text"]
    assert examine(folder, Limits(**limits, text_unit="chars")) == {}


def test_what_reaches_a_limit_is_within_it(folder):
    samples = sound_samples()
    write_shards(folder, samples)
    frames = max(len(sample.latents) for sample in samples)
    tokens = max(len(sample.metadata["text"]) for sample in samples) + 2  # begin and end
    assert examine(folder, Limits(max_frames=frames, max_text_tokens=tokens)) == {}
    above = examine(folder, Limits(max_frames=frames - 1, max_text_tokens=tokens - 1))
    assert set(above) == {"long_latents", "long_text"}


def test_the_worst_example_comes_first(folder):
    samples = sound_samples()
    write_shards(folder, samples)
    finding = examine(folder, Limits(max_frames=60, max_examples=1))["long_latents"]
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


def test_threads_and_chunks_change_nothing(folder, monkeypatch):
    from torchtitan.models.dit_tts.doctor import scan as module

    samples = sound_samples(40)
    samples[0].latents[:] += 3
    samples[1].latents[4, 2] = -20
    write_shards(folder, samples)
    dataset = open_dataset(str(folder), CHANNELS)
    monkeypatch.setattr(module, "CHUNK_SAMPLES", 7)
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
    np.testing.assert_allclose(one.channels.mean, latents.mean(0), atol=1e-5)
    np.testing.assert_allclose(one.channels.std, latents.std(0), rtol=1e-4)


def test_subset_is_even_and_seeded(folder):
    chosen = choose_samples(1000, 100, seed=3)
    assert (chosen // 10 == np.arange(100)).all()
    np.testing.assert_array_equal(chosen, choose_samples(1000, 100, seed=3))
    assert (chosen != choose_samples(1000, 100, seed=4)).any()
    np.testing.assert_array_equal(choose_samples(5, 0, 0), np.arange(5))
    np.testing.assert_array_equal(choose_samples(5, 9, 0), np.arange(5))

    write_shards(folder, sound_samples())
    dataset = open_dataset(str(folder), CHANNELS)
    found = measure(dataset, choose_samples(24, 6, 0), 2)
    assert (found.rows["state"] == READ).sum() == 6
    assert examine(folder, max_samples=6) == {}


def test_shard_that_changes_under_way_ends_the_pass(folder):
    path = write_shards(folder, sound_samples())[1]
    dataset = open_dataset(str(folder), CHANNELS)
    with open(path, "ab") as file:
        file.write(bytes(512))
    with pytest.raises(InputError, match="shard-000001.tar"):
        measure(dataset, np.arange(24), 2)


def test_huge_float32_values_do_not_overflow(folder):
    samples = sound_samples(6)
    folder.mkdir(parents=True)
    members = {}
    for number, sample in enumerate(samples):
        latents = sample.latents.astype(np.float32)
        if number == 4:
            latents *= np.float32(1e30)
        members |= raw_members(changed(sample, latents=latents))
    write_raw(folder / "x.tar", members)
    findings = examine(folder)
    assert {"std_outlier", "peak_outlier"} == set(findings)
    assert findings["std_outlier"].examples[0].where == "x:utt004"


def test_remote_shards_are_read_through_the_filesystem(folder):
    samples = sound_samples()
    samples[5] = changed(samples[5], latents=np.zeros((50, CHANNELS)))
    memory = fsspec.filesystem("memory")
    for path in write_shards(folder, samples):
        memory.pipe(f"/inspected/{path.name}", path.read_bytes())
    try:
        findings = examine("memory://inspected")
    finally:
        memory.rm("/inspected", recursive=True)
    assert findings["zero_latents"].examples[0].where == "shard-000000:utt005"


@pytest.mark.parametrize("form", ["sizes", "list"])
def test_other_forms_of_the_record(folder, form):
    """Sizes alone, as older preparations wrote them, and a list."""
    paths = write_shards(folder, sound_samples())
    sizes = {f"train/{path.name}": path.stat().st_size for path in paths}
    listed = [{"name": name, "bytes": size + 1} for name, size in sizes.items()]
    sizes["train/shard-000001.tar"] += 1
    record(folder, [])
    shards = sizes if form == "sizes" else listed
    (folder.parent / "prepare.json").write_text(json.dumps({"shards": shards}))
    finding = examine(folder)["shard_changed"]
    assert finding.count == (1 if form == "sizes" else 2)
    assert "bytes where" in finding.examples[0].detail


def test_record_that_cannot_be_read_says_nothing(folder):
    write_shards(folder, sound_samples())
    (folder / "prepare.json").write_text("{")
    assert examine(folder) == {}


def test_part_of_a_folder_misses_nothing(folder):
    """Who asks for one shard of two is not told that the other is missing."""
    paths = write_shards(folder, sound_samples())
    record(folder, paths)
    assert examine(paths[0]) == {}


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
