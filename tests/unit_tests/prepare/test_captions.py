"""Captions: their words, what they are measured by, and whose are kept."""

import json
import math

import numpy as np
import pytest
import soundfile

from tests.helpers import speech_corpora as corpora
from tests.helpers.speech_corpora import RATE, prepare
from titan_tts.prepare.captions import caption, thirds, voice_figures
from titan_tts.prepare.settings import AudioSettings
from torchtitan.models.dit_tts.data.dataset import open_dataset

COLLECTION = {
    "pitch": [90.0, 95.0, 150.0, 151.0, 220.0, 230.0],
    "pitch_range": [2.0, 2.0, 6.0, 6.0, 12.0, 12.0],
    "chars_per_second": [8.0, 8.0, 12.0, 12.0, 16.0, 16.0],
    "loudness": [-40.0, -40.0, -30.0, -30.0, -20.0, -20.0],
}
ROWS = [dict(zip(COLLECTION, each)) for each in zip(*COLLECTION.values(), strict=True)]


@pytest.mark.parametrize(
    "figures, said",
    [
        ({"pitch": 95}, "a low voice"),
        ({"pitch": 220.0, "pitch_range": 2.0}, "a high, monotonous voice"),
        ({"pitch_range": 12.0, "chars_per_second": 8}, "a lively voice, speaking slowly"),
        ({"pitch": 150.5, "chars_per_second": 16.0}, "a voice, speaking fast"),
        ({"loudness": -41.5, "snr_db": 19.9}, "a voice, quiet, with some background noise"),
        ({"loudness": -20.0, "snr_db": -3.0}, "a voice, loud, with much background noise"),
        ({"snr_db": 20.0, "bandwidth": 4000}, "a voice"),
        ({"pitch": None, "bandwidth": 3600}, "a voice, over a telephone"),
        # What a hand or another program wrote.
        ({"pitch": "low", "loudness": True, "snr_db": math.nan, "bandwidth": 0}, "a voice"),
        ({"pitch": -5.0, "chars_per_second": 10**400, "pitch_range": [1]}, "a low voice"),
        ({}, "a voice"),
    ],
)
def test_what_is_said(figures, said):
    assert caption(figures, thirds([*ROWS, {"pitch": "x"}, {}])) == said


def test_differences_that_nobody_hears_are_not_said():
    """Differences below a semitone, a tenth of the speed and 2 dB of level are not mentioned."""
    near = [
        {"pitch": 100.0 + n, "chars_per_second": 12 + n / 9, "loudness": -n / 3} for n in range(6)
    ]
    assert {caption(each, thirds(near)) for each in near} == {"a voice"}
    assert caption({"pitch": 109.0}, thirds(near)) == "a high voice"
    assert caption(ROWS[0], thirds([])) == "a voice"


def test_figures_of_voices():
    """slt speaks at 178 Hz and rms at 95; a telephone's band and silence are known for what they are."""
    found = {}
    for one in corpora.speech(each=1):
        found[one.speaker] = voice_figures(one.samples, RATE)
    assert found["slt"]["pitch"] == pytest.approx(178, abs=12)
    assert found["rms"]["pitch"] == pytest.approx(95, abs=8)
    assert all(1 < each["pitch_range"] < 15 for each in found.values())
    assert all(5000 < each["bandwidth"] < 8000 for each in found.values())
    spectrum = np.fft.rfft(one.samples)
    spectrum[int(3400 / 8000 * len(spectrum)) :] = 0
    hiss = 1e-4 * np.random.default_rng(0).standard_normal(len(one.samples))
    narrow = (np.fft.irfft(spectrum, len(one.samples)) + hiss).astype(np.float32)
    assert 3000 < voice_figures(narrow, RATE)["bandwidth"] <= 3400
    silent = {"pitch": None, "pitch_range": None, "bandwidth": 0}
    assert voice_figures(np.zeros(RATE, np.float32), RATE) == silent
    assert voice_figures(np.zeros(1, np.float32), 44_100) == silent


def test_prepare_describes_what_has_no_caption(tmp_path):
    """Beside all of the source, whatever chunk and shard they are in; a person's caption stays."""
    said_by = {"slt": [], "rms": []}
    for one in corpora.speech(each=3, voices=tuple(said_by)):
        said_by[one.speaker].append(one)
    rows = []
    for number, one in enumerate([*said_by["rms"][:3], *said_by["slt"][:3]]):
        gain = (0.1, 0.5, 1.0)[number % 3]
        soundfile.write(tmp_path / f"{one.key}.wav", gain * one.samples, RATE)
        row = {"audio": f"{one.key}.wav", "key": one.key, "text": one.text, "speaker": one.speaker}
        rows.append(row | {"measured": "with a ruler", "caption": ["", None, ""][number % 3]})
    rows[0]["caption"] = "my own words"
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    off = AudioSettings(loudness=None)
    small = {"chunk_items": 2, "samples_per_shard": 4}
    for name, audio, more in (
        ("off", off, {}),
        ("level", AudioSettings(), {}),
        ("none", off, None),
    ):
        captions = {} if more is None else {"captions": True}
        record = prepare(tmp_path / "list.jsonl", tmp_path / name, audio=audio, **small | captions)
        assert record["settings"].get("captions") == captions.get("captions")
        shards = open_dataset([str(tmp_path / name / "train")], corpora.CHANNELS)
        found = {shards.key(sample): shards.metadata(sample) for sample in range(len(shards))}
        said = [found[row["key"]].get("caption") for row in rows]
        if more is None:
            assert said == ["my own words", None, "", "", None, ""]
            continue
        assert said[0] == "my own words" and found[rows[0]["key"]]["measured"] == "with a ruler"
        assert [each.startswith("a low") for each in said] == [False, True, True, *[False] * 3]
        if name == "off":
            assert ["quiet" in each for each in said] == [number == 3 for number in range(6)]
        else:
            assert not any("quiet" in each or "loud" in each for each in said)
        assert not any("measured" in found[row["key"]] for row in rows[1:])
