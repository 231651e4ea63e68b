"""Each step from a recording to a shard, against figures that are known beforehand."""

import cmath
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers.speech_corpora import audio_bytes
from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio import decode
from torchtitan.models.dit_tts.prepare.chunk_file import (
    ChunkHeader,
    EncodedSample,
    read_digest,
    read_frames,
    read_header,
    write_chunk,
)
from torchtitan.models.dit_tts.prepare.pipeline import RunOptions, prepare_corpus
from torchtitan.models.dit_tts.prepare.processing import Processed, loudness, process
from torchtitan.models.dit_tts.prepare.recordings import Item, ItemRules, make_item
from torchtitan.models.dit_tts.prepare.references import (
    SampleTable,
    TableBuilder,
    choose_references,
)
from torchtitan.models.dit_tts.prepare.settings import AudioSettings, PrepareSettings

RATE = 16_000
OFF = AudioSettings(loudness=None, max_silence=None)
HERE = RunOptions(workers=1, device="cpu")


def tone(seconds: float, level: float = 0.1, rate: int = RATE, hertz: float = 997) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


# ---- decoding


def test_long_recordings_and_parts_are_read_in_order():
    """More than one block of reading; 16-bit samples come back exactly."""
    samples = np.random.default_rng(0).integers(-32768, 32768, (600_001, 2)) / 32768
    data = audio_bytes(samples, RATE, "WAV", "PCM_16")
    whole, rate = decode(data)
    assert rate == RATE and np.array_equal(whole, samples.astype(np.float32))
    assert np.array_equal(decode(data, 1.5, 20.0)[0], whole[24_000:344_000])


# ---- loudness


def k_weighted_level(hertz: float, level: float) -> float:
    """LUFS of a steady sine by the filters of ITU-R BS.1770-4 at 48 kHz."""
    z = cmath.exp(-2j * math.pi * hertz / 48_000)
    shelf = (1.53512485958697 - 2.69169618940638 * z + 1.19839281085285 * z**2) / (
        1 - 1.69065929318241 * z + 0.73248077421585 * z**2
    )
    high_pass = (1 - 2 * z + z**2) / (1 - 1.99004745483398 * z + 0.99007225036621 * z**2)
    return -0.691 + 10 * math.log10(level**2 / 2 * abs(shelf * high_pass) ** 2)


@pytest.mark.parametrize("hertz", [60, 997, 6000])
def test_loudness_of_a_sine(hertz):
    found = loudness(tone(3, 0.1, 48_000, hertz), 48_000)
    assert found == pytest.approx(k_weighted_level(hertz, 0.1), abs=0.05)


def test_loudness_leaves_quiet_parts_out():
    """Two loud seconds and two quiet ones: of the blocks of 0.4 s each 0.1 s, 17 are loud and three
    partly, by 3/4, 1/2 and 1/4."""
    waveform = np.concatenate([tone(2, 0.1, 48_000), tone(2, 0.001, 48_000)])
    expected = k_weighted_level(997, 0.1) + 10 * math.log10((17 + 1.5) / 20)
    assert loudness(waveform, 48_000) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("wanted, level", [(-16.0, 0.1), (-30.0, 0.1), (-16.0, 0.02)])
def test_the_level_after_silence_is_cut_is_the_wanted_one(wanted, level):
    silence = np.zeros(2 * 48_000, np.float32)
    samples = np.concatenate([silence, tone(3, level, 48_000), silence])[:, None]
    done = process(samples, 48_000, 48_000, "x", AudioSettings(loudness=wanted))
    assert isinstance(done, Processed) and not done.peak_limited
    # The silence that is kept, 0.25 s on each side, is in a few of the blocks.
    middle = done.waveform[48_000:96_000]
    gain = 20 * math.log10(float(np.abs(middle).max()) / level)
    assert gain == pytest.approx(wanted - k_weighted_level(997, level), abs=0.5)
    assert done.gain_db == pytest.approx(gain, abs=0.01)


def test_a_peak_limits_the_gain():
    samples = tone(2, 0.02)
    samples[16_000] = -0.9
    done = process(samples[:, None], RATE, RATE, "x", AudioSettings(max_silence=None))
    assert done.peak_limited and done.gain_db == pytest.approx(-20 * math.log10(0.9), abs=2e-3)
    assert 0.999 < np.abs(done.waveform).max() <= 1


# ---- silence and filters


def test_silence_is_cut_to_the_seconds_that_are_kept():
    """One second before, two behind; a pause and a word 30 dB down belong to the speech, an offset
    of the whole recording does not."""
    parts = [
        np.zeros(RATE),
        tone(1),
        np.zeros(RATE // 2),
        tone(1, 0.1 * 10**-1.5),
        np.zeros(2 * RATE),
    ]
    samples = (np.concatenate(parts) + 0.05).astype(np.float32)[:, None]
    settings = AudioSettings(loudness=None, max_silence=0.25, max_seconds=3.02)
    done = process(samples, RATE, RATE, "x", settings)
    assert isinstance(done, Processed)
    assert done.seconds == len(done.waveform) / RATE == pytest.approx(3.0, abs=0.011)
    assert done.silence_cut_seconds == pytest.approx(2.5, abs=0.011)
    start = round(0.75 * RATE)
    assert np.abs(done.waveform[:RATE] - samples[start : start + RATE, 0]).max() < 1e-6


@pytest.mark.parametrize("text", ["four", "  four  "])
def test_what_is_at_a_limit_is_kept(text):
    samples = np.stack([tone(1), tone(1)], 1)
    samples[:1600:2, 0], samples[1:1600:2, 0] = 1.0, -1.0  # a twentieth of all values
    at = AudioSettings(None, None, 1.0, 1.0, 4.0, 4.0, 0.05)
    assert isinstance(process(samples, RATE, RATE, text, at), Processed)
    below = AudioSettings(None, None, max_clipped=0.0499)
    assert process(samples, RATE, RATE, text, below) == "clipped"


# ---- items


def test_the_split_is_drawn_by_seed_and_key_and_given_ones_stay():
    def split(key: str, seed: int, **row: str) -> str:
        rules = ItemRules(heldout_share=0.3, heldout_seed=seed)
        item = make_item({"text": "x", "speaker": "s"} | row, key, {}, rules)
        assert isinstance(item, Item)
        return item.split

    for seed in (0, 1):
        found = [split(f"k{n}", seed) for n in range(200)]
        for number, one in enumerate(found):
            digest = hashlib.sha256(f"{seed}\0k{number}".encode()).digest()
            drawn = int.from_bytes(digest[:8], "little") / 2**64
            assert one == ("heldout" if drawn < 0.3 else "train")
        assert 40 < found.count("heldout") < 80
    assert {split(f"k{n}", 0, split="train-clean") for n in range(50)} == {"train"}
    assert {split(f"k{n}", 0, split="test-other") for n in range(50)} == {"heldout"}


def test_the_command_lines_speaker_is_of_rows_without_one():
    rules = ItemRules(speaker="someone")
    speakers = [
        make_item({"text": "x"} | row, "k", {}, rules).speaker
        for row in ({"speaker": "ann"}, {"speaker": ""}, {}, {"speaker_id": 7})
    ]
    assert speakers == ["ann", "someone", "someone", "7"]


# ---- references


def make_table() -> SampleTable:
    """ann: 40 training utterances of 3 to 42 frames and two held out; bob: one; cat: three of 4."""
    samples = [("ann", "train", 3 + n) for n in range(40)]
    samples[20:20] = [("ann", "heldout", 9), ("bob", "train", 11), ("cat", "train", 4)]
    samples += [("cat", "train", 4), ("ann", "heldout", 8), ("cat", "train", 4)]
    builder, start = TableBuilder(), 0
    header = ChunkHeader(2)
    for number, (speaker, split, frames) in enumerate(samples):
        header.samples.append(EncodedSample(f"k{number}", speaker, split, start, frames, 0, {}))
        start += frames
    builder.add(header, 0)
    return builder.build()


@pytest.mark.parametrize("count, longest", [(1, 384), (1, 5), (3, 384), (3, 25)])
def test_references_are_other_training_utterances_of_the_speaker(count, longest):
    table = make_table()
    frames, speaker = table.columns["frames"], table.columns["speaker"]
    split = table.columns["split"]
    for sample in range(len(table)):
        spans = choose_references(table, sample, 0, count, longest)
        assert spans == choose_references(table, sample, 0, count, longest)
        assert len({span.sample for span in spans}) == len(spans) <= count
        length = sum(span.frames for span in spans)
        assert length <= longest
        if table.key(sample) == "k21":  # bob has no other: at most half of it
            assert [span.sample for span in spans] == [sample] and length == min(5, longest)
            assert spans[0].start + length <= 11
            continue
        for number, span in enumerate(spans):
            assert span.sample != sample and speaker[span.sample] == speaker[sample]
            assert split[span.sample] == 0 and span.frames >= 1
            assert 0 <= span.start and span.start + span.frames <= frames[span.sample]
            # One stretch over the utterances: cut before the first and behind the last alone.
            assert span.start == 0 or number == 0
            assert span.start + span.frames == frames[span.sample] or number == len(spans) - 1
        if longest == 384:
            assert all(span.frames == frames[span.sample] for span in spans)
            assert len(spans) == min(count, 39 if speaker[sample] == 0 else 2)
        elif count == 1:
            assert length == min(longest, frames[spans[0].sample])


def test_references_differ_by_sample_and_seed():
    table = make_table()
    ann = [sample for sample in range(len(table)) if table.columns["speaker"][sample] == 0]

    def drawn(seed: int) -> list:
        return [choose_references(table, sample, seed, 1, 5)[0] for sample in ann]

    first, second = drawn(0), drawn(1)
    assert len({span.sample for span in first}) > 15  # of 42 draws out of 40
    assert len({span.start for span in first}) > 10
    assert sum(a.sample != b.sample for a, b in zip(first, second)) > 30


# ---- chunk files


def test_a_chunk_gives_each_samples_frames_back_and_knows_damage(tmp_path):
    path = tmp_path / "00" / "a.chunk"
    latents = np.arange(30, dtype=np.float16).reshape(10, 3)
    samples = [EncodedSample("a", "s", "train", 0, 4, 0, {"text": "é"})]
    samples.append(EncodedSample("b", "s", "heldout", 4, 6, 0, {}))
    write_chunk(path, ChunkHeader(3, samples, {"silent": 2}), latents + 1)
    of_others = read_digest(path)
    write_chunk(path, ChunkHeader(3, samples, {"silent": 2}), latents)
    assert read_digest(path) != of_others
    header, offset = read_header(path)
    assert header.samples == samples and header.dropped == {"silent": 2}
    np.testing.assert_array_equal(read_frames(path, offset, 4, 6, 3), latents[4:])
    np.testing.assert_array_equal(read_frames(path, offset, 5, 2, 3), latents[5:7])
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(InputError, match="cut short"):
        read_frames(path, offset, 4, 6, 3)
    for place in (0, 20, offset - 2):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(InputError, match="is damaged"):
            read_header(path)


# ---- all of it


def write_manifest(folder: Path) -> dict[str, np.ndarray]:
    """Ten recordings of equally many frames, their lengths 20 samples apart; each its own pitch."""
    folder.mkdir()
    recordings, rows = {}, []
    for number in range(10):
        samples = tone((6000 + 20 * number) / RATE, 0.1 + 0.01 * number, RATE, 200 + 150 * number)
        soundfile.write(folder / f"{number}.wav", samples, RATE, subtype="FLOAT")
        recordings[f"k{number}"] = samples
        row = {"key": f"k{number}", "audio": f"{number}.wav", "text": f"text {number}"}
        rows.append(row | {"speaker": "ann", "split": "heldout" if number in (2, 5) else "train"})
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recordings


def test_a_preparation_tells_what_it_made(tmp_path):
    recordings = write_manifest(tmp_path / "source")
    settings = PrepareSettings(samples_per_shard=3, audio=OFF)
    source = tmp_path / "source/list.jsonl"
    record = prepare_corpus(source, tmp_path / "out", settings, HERE)
    codec, seen, frames = build_codec("mel_dct"), {}, 0
    latents: dict[str, np.ndarray] = {}
    for split in ("train", "heldout"):
        dataset = open_dataset(str(tmp_path / "out" / split), 128)
        for sample in range(len(dataset)):
            loaded = dataset.load(sample)
            key = dataset.key(sample)
            assert key not in seen
            seen[key] = (split, loaded)
            latents[key] = loaded.latents
    assert {key for key, (split, _) in seen.items() if split == "heldout"} == {"k2", "k5"}
    assert seen.keys() == recordings.keys()
    for key, (split, loaded) in seen.items():
        samples = recordings[key]
        expected = codec.encode(torch.from_numpy(samples)).half().float().numpy()
        np.testing.assert_allclose(loaded.latents, expected, atol=2e-2)
        assert loaded.metadata["target_duration"] == len(samples) / RATE
        assert loaded.metadata["text"] == f"text {key[1:]}"
        source = loaded.metadata["reference_key"]
        assert source != key and seen[source][0] == "train"
        np.testing.assert_array_equal(loaded.reference, latents[source])
        frames += len(loaded.latents) if split == "train" else 0
    shards = record["shards"]
    assert [shard["samples"] for shard in shards.values()] == [3, 3, 2, 2]
    for name, shard in shards.items():
        content = (tmp_path / "out" / name).read_bytes()
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert shard["bytes"] == len(content) and shard["frames"] == 10 * shard["samples"]
    hours = round(80 / 25 / 3600, 4)
    expected = {"samples": 8, "frames": 80, "hours": hours, "shards": 3}
    assert record["summary"]["train"] == expected and frames == 80


def test_latents_that_tables_hold(tmp_path):
    """The source's duration where it fits the frames, theirs where not; its reference is kept. One
    table has two small row groups, the other one of more rows than are read at once."""
    import pyarrow
    from pyarrow import parquet

    durations = (0.41, 9.0, None)
    values = np.arange(41 * 10 * 128).reshape(41, 10, 128) % 1009
    rows = []
    for number, own in enumerate(values):
        row = {"id": f"k{number}", "text": f"text {number}", "speaker": "s"}
        row |= {"latents": own.tolist(), "reference": (own[5:9] + 100).tolist()}
        rows.append(row | {"target_duration": durations[number % 3]})
    (tmp_path / "source").mkdir()
    for name, part, group in (("a", rows[:20], 10), ("b", rows[20:], 21)):
        table = pyarrow.Table.from_pylist(part)
        parquet.write_table(table, tmp_path / f"source/{name}.parquet", row_group_size=group)
    settings = PrepareSettings(max_reference_frames=3)
    prepare_corpus(tmp_path / "source", tmp_path / "out", settings, HERE)
    dataset = open_dataset(str(tmp_path / "out/train"), 128)
    assert len(dataset) == len(rows)
    for number, own in enumerate(values):
        loaded = dataset.load(number)
        assert loaded.metadata["text"] == f"text {number}"
        np.testing.assert_array_equal(loaded.latents, own)
        np.testing.assert_array_equal(loaded.reference, own[5:8] + 100)
        assert loaded.metadata["target_duration"] == (0.41, 0.4, 0.4)[number % 3]
