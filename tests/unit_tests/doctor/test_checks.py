"""Every kind of fault is found in a dataset that has it, and none in a valid one."""

import json
import os
from dataclasses import replace

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
from titan_tts.doctor import checks
from titan_tts.doctor.checks import check_dataset, log_distance
from titan_tts.doctor.findings import Example, Limits
from titan_tts.doctor.scan import choose_samples, measure, unspoken
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.index import load_index

FRAME = np.linspace(-1, 1, CHANNELS)
ZEROS = np.zeros((60, CHANNELS))


def examine(*paths, limits=Limits(), max_samples=0):
    """code -> finding, without that two dozen texts are too few"""
    dataset = open_dataset([str(path) for path in paths], CHANNELS, on_error="report")
    found = measure(dataset, choose_samples(len(dataset), max_samples), 2)
    findings = {finding.code: finding for finding in check_dataset(dataset, found, limits)}
    findings.pop("texts_not_compared", None)
    return findings


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


def test_the_first_and_the_last_speaker_may_have_one_utterance(folder):
    samples = sound_samples()
    for number, speaker in ((0, "a"), (23, "z"), (5, None), (1, "two"), (22, "two")):
        samples[number] = changed(samples[number], metadata={"speaker": speaker})
    write_shards(folder, samples)
    findings = examine(folder)
    single = findings["single_utterance_speaker"]
    assert [one.detail for one in single.examples] == ["speaker 'a'", "speaker 'z'"]
    assert single.count == 2


def cut_off(folder):
    path = write_shards(folder, sound_samples())[1]
    os.truncate(path, path.stat().st_size - 30_000)
    return str(path)


def second_of_two(lacks="", nan=False):
    """A second sample that lacks a member, or has a NaN."""

    def make(folder):
        first, second = sound_samples(2)
        if nan:
            second.latents[3, 1] = np.nan
        members = raw_members(first) | raw_members(second)
        members.pop(f"{second.key}{lacks}", None)
        write_raw(folder / "x.tar", members)
        return f"x:{second.key}"

    return make


def flipped_after_indexing(folder):
    path = write_shards(folder, sound_samples())[0]
    index = load_index(str(path))
    flip_byte_unnoticed(path, int(index.columns["latents_offset"][5]) + 100)
    return "shard-000000:utt005"


def shard_unlike_its_record(missing):
    def make(folder):
        paths = write_shards(folder, sound_samples())
        record(folder, paths, **{} if missing else {"shard-000001": 10_000})
        if missing:
            paths[1].unlink()
        return str(paths[1])

    return make


def one_sample(number, change):
    """`change(sample)` -> what replaces it in the sample of this number."""
    return lambda folder: write_changed(folder, number, **change(sound_samples()[number]))


def with_peak(sample):
    sample.latents[10, 3] = 20
    return {"latents": sample.latents}


def with_the_latents_of_another(folder):
    first = sound_samples()[1]
    metadata = {"target_duration": len(first.latents) / 25, "text": first.metadata["text"][::-1]}
    return write_changed(folder, 20, latents=first.latents, metadata=metadata)


def metadata(number, **changes):
    return one_sample(number, lambda sample: {"metadata": changes})


# A code, and a function of a folder that makes the fault and returns where the first example must point.
FAULTS = [
    ("corrupt_shard", cut_off),
    ("unusable_sample", second_of_two(lacks=".ref.npy")),
    ("not_finite", second_of_two(nan=True)),
    ("corrupt_sample", flipped_after_indexing),
    ("shard_changed", shard_unlike_its_record(missing=True)),
    ("shard_changed", shard_unlike_its_record(missing=False)),
    ("constant_latents", one_sample(7, lambda _: {"latents": np.tile(FRAME, (60, 1))})),
    ("constant_reference", one_sample(13, lambda _: {"reference": np.zeros((20, CHANNELS))})),
    ("std_outlier", one_sample(2, lambda sample: {"latents": sample.latents / 4})),
    ("peak_outlier", one_sample(2, with_peak)),
    ("clipped", metadata(4, clipped=0.011)),
    ("chars_per_second_outlier", metadata(4, text="hm")),
    ("empty_text", metadata(4, text=" \n")),
    ("unspoken_parts", metadata(4, text="Press the pound key. (simple tone sound plays)")),
    ("not_nfc", metadata(4, speaker="Jo\u0308rg")),
    ("long_text", metadata(4, text="long " * 60)),
    ("long_latents", one_sample(4, lambda _: {"latents": speech(np.random.default_rng(1), 800)})),
    ("duration_mismatch", metadata(9, target_duration=99.0)),
    ("duplicate_latents", with_the_latents_of_another),
    ("reference_from_target", one_sample(3, lambda one: {"reference": one.latents[10:40]})),
    ("single_utterance_speaker", metadata(6, speaker="once")),
]
# What the example says, where it has a figure.
DETAILS = {
    "constant_latents": "60 frames",
    "clipped": "1.1%",
    "chars_per_second_outlier": "0.5 characters per second, the median of its language is 13.9",
    "long_text": "302 tokens",  # with begin and end
    "duration_mismatch": "62 frames for 99.000 seconds, which are 2475.0 frames at 25 per second",
    "std_outlier": "standard deviation 0.195, the median is 0.798",
    "not_nfc": r"'Jo\u0308rg', which prepare writes as 'J\xf6rg'",
    "duplicate_latents": "the latents of shard-000000:utt001",
}
# Faults that cannot come alone.
ALSO = {
    "not_nfc": {"single_utterance_speaker"},
    "long_text": {"chars_per_second_outlier"},
    "long_latents": {"chars_per_second_outlier", "duration_mismatch"},
    "empty_text": {"chars_per_second_outlier"},
    "constant_latents": {"chars_per_second_outlier", "duration_mismatch"},
}
# Of two samples, each speaker has one.
ALSO |= dict.fromkeys(("not_finite", "unusable_sample"), {"single_utterance_speaker"})


@pytest.mark.parametrize("code, make", FAULTS)
def test_fault_is_found(code, make, folder):
    where = make(folder)
    findings = examine(folder)
    assert findings[code].count == 1
    assert findings[code].examples[0].where == where
    detail = findings[code].examples[0].detail
    assert detail and DETAILS.get(code, "") in detail
    assert set(findings) - {code} <= ALSO.get(code, set())


def test_letters_without_phones(folder):
    """Both words would be "Chinese letter Chinese letter"; Korean is read."""
    samples = sound_samples()
    for number, text in ((3, "in 東京 today"), (5, "in 京都 today"), (7, "in 안녕 today")):
        samples[number].metadata["text"] = text
    write_shards(folder, samples)
    assert "lost_letters" not in examine(folder)
    found = examine(folder, limits=Limits(text_unit="phones:en-us"))["lost_letters"]
    assert found.count == 2 and "'東', '京'" in found.examples[0].detail


def test_what_is_written_but_not_said():
    found = {
        "<beep ascending>": "<beep ascending>",
        "Oh no! *sighs* Well. [music]": "*sighs*",
        "So (laughs) what": "(laughs)",
        "(1 second of silence)": "(1 second of silence)",
        "Two (as he always said) went by, at 3 < 4 * 2.": "",
    }
    assert {text: unspoken({"text": text}).strip() for text in found} == found


def test_valid_dataset_has_no_finding(folder):
    paths = write_shards(folder, sound_samples())
    record(folder, paths)
    assert examine(folder) == {}
    of_twice_the_rate = examine(folder, limits=Limits(frames_per_second=50))
    example, *_ = of_twice_the_rate["duration_mismatch"].examples
    assert "the median sample has 25 per second" in example.detail
    # One shard of two is complete in itself.
    assert examine(paths[0]) == {} == examine(folder, max_samples=6)
    (folder / "prepare.json").write_text("{")
    assert examine(folder) == {}  # the one above counts
    (folder / "prepare.json").write_text('{"shards": {"shard-000000.tar": {"bytes": 1}}}')
    [example] = examine(folder)["shard_changed"].examples
    assert example.where == str(paths[0])


def test_a_held_out_sample_that_is_trained_on(folder):
    samples = sound_samples()
    held = folder.parent / "dev-clean"
    write_shards(folder, samples[:16])
    write_shards(held, [*samples[16:], changed(samples[5], key="again")])
    for paths in ((folder, held), (held, folder)):
        finding, where = examine(*paths)["heldout_in_training"], "dev-clean/shard-000001:again"
        assert (finding.count, finding.severity) == (1, "error")
        assert finding.examples == [Example(where, "the latents of train/shard-000000:utt005")]
    held.rename(folder.parent / "train2")  # two parts of one kind are nobody's leak
    assert "heldout_in_training" not in examine(folder, folder.parent / "train2")


def test_two_languages_of_different_speed_are_each_compared_with_itself(folder, monkeypatch):
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
    monkeypatch.setattr(checks, "EXAMPLES", 3)
    finding = examine(folder)["chars_per_second_outlier"]
    assert finding.count == 4 and len(finding.examples) == 3


def test_what_reaches_a_limit_is_within_it_and_the_worst_comes_first(folder):
    samples = sound_samples()
    write_shards(folder, samples)
    frames = max(len(sample.latents) for sample in samples)
    tokens = max(len(sample.metadata["text"]) for sample in samples) + 2  # begin and end
    assert examine(folder, limits=Limits(max_frames=frames, max_text_tokens=tokens)) == {}
    above = examine(folder, limits=Limits(max_frames=frames - 1, max_text_tokens=tokens - 1))
    assert set(above) == {"long_latents", "long_text"}
    limits = Limits(max_frames=frames, max_text_tokens=tokens)
    chinese = changed(samples[4], metadata={"text": "你好世" * 20})  # 60 characters, 180 bytes
    write_shards(folder, [*samples[:4], chinese, *samples[5:]])
    assert list(examine(folder, limits=limits)) == ["long_text"]
    assert examine(folder, limits=replace(limits, text_unit="chars")) == {}

    finding = examine(folder, limits=Limits(max_frames=60))["long_latents"]
    longest = max(samples, key=lambda sample: len(sample.latents))
    assert finding.count == sum(len(sample.latents) > 60 for sample in samples) > 1
    assert finding.examples[0].where.split(":")[1] == longest.key


def near_misses():
    samples = sound_samples()
    seconds = samples[9].metadata["target_duration"]
    nothing = {"reference": np.zeros((0, CHANNELS)), "metadata": {"reference_key": "utt003"}}
    yield 9, {"metadata": {"target_duration": seconds + 1.9 / 25}}, []
    yield 9, {"metadata": {"target_duration": seconds + 2.1 / 25}}, ["duration_mismatch"]
    # A reference encoded again from the same recording has other bytes, but its key is known.
    yield 3, {"metadata": {"reference_key": "utt003"}}, ["reference_from_target"]
    yield 3, {"reference": samples[3].latents}, ["reference_from_target"]
    for duration in (0, True, "2 s", None):
        yield 9, {"metadata": {"target_duration": duration}}, []
    yield 7, {"latents": ZEROS, "metadata": {"target_duration": 2.4}}, ["constant_latents"]
    yield 3, {"reference": samples[4].reference[:1]}, []
    yield 3, {"reference": np.full((1, CHANNELS), 0.5)}, ["constant_reference"]
    yield 2, {"latents": samples[2].latents / 16}, ["std_outlier"]  # a low maximum is a level
    yield 3, nothing, []
    long = samples[4].metadata["text"]
    yield 4, {"metadata": {"text": f"o\u0308{long[1:]}"}}, ["not_nfc"]
    yield 4, {"metadata": {"text_verbatim": f"o\u0308{long[1:]}"}}, ["not_nfc"]
    yield 4, {"metadata": {"text": f"\u00f6\ufb01{long[2:]}"}}, []


@pytest.mark.parametrize("number, changes, codes", list(near_misses()))
def test_at_the_limit_of_a_fault(folder, number, changes, codes):
    where = write_changed(folder, number, **changes)
    findings = examine(folder)
    assert [code for code in findings if code != "chars_per_second_outlier"] == codes
    assert all(findings[code].examples[0].where == where for code in codes)


def test_outliers_are_measured_by_medians():
    """An outlier's logarithm is 5 robust deviations off, and the value at least a factor of 2."""
    values = np.array([1.0, 1.0, 1.0, 1.0, 1.9])
    distance, limit, centre = log_distance(values, values > 0, 2.0)
    assert centre == 1 and limit == pytest.approx(np.log(2)) and (distance < limit).all()
    wide = np.exp(np.random.default_rng(0).normal(0, 1, 10_000))
    _, limit, _ = log_distance(wide, wide > 0, 2.0)
    assert limit == pytest.approx(5, rel=0.05)
