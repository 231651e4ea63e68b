"""The speech of the base voice's recipe, by a flite that says each text in half a second at 200 Hz."""

import json
import tarfile

import numpy as np
import pytest
import soundfile

from recipes.base_voice import speech, texts
from recipes.base_voice.speech import Voice

WARPS = {"plain": 1.0, "high": 1.25, "low": 0.8, "same": 1.0}
FORTUNE = (
    "He asked the tall Mr. Smith again and again.\n\t\t-- A. Nobody\n%\nIt rained on all of us.\n"
)


def test_what_is_said_by_whom_and_how(tmp_path, monkeypatch):
    for warp in WARPS.values():
        wave = np.sin(np.arange(8000 * warp) * 2 * np.pi * 200 / 16_000) / 3
        soundfile.write(tmp_path / f"{warp}.wav", wave, 16_000)
    flite = tmp_path / "flite"
    flite.write_text(f'#!/bin/sh\ncp "{tmp_path}/${{4#duration_stretch=}}.wav" "$8"\n')
    flite.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "some.u8").write_text(FORTUNE)
    (tmp_path / "data.noun").write_text('1 | gloss; "he was quite fast"; "the end"\n')
    for place, name, value in (
        (texts, "FORTUNES", tmp_path),
        (texts, "WORDNET", tmp_path),
        (texts, "MADE", 60),
        (texts, "HELDOUT", 4),
        (speech, "VOICES", tuple(Voice(name, "a", 1.0, warp) for name, warp in WARPS.items())),
        (speech, "NEW_VOICE", Voice("new", "b", 1.0)),
        (speech, "NEW_VOICE_MINUTES", 1 / 60),
        (speech, "NEW_VOICE_TESTS", 2),
        (speech, "_SECONDS_A_WORD", 0.03),
    ):
        monkeypatch.setattr(place, name, value)
    trained, held_out = texts.corpus_texts(0)
    assert {"It rained on all of us.", "He was quite fast."} < {*trained, *held_out}
    assert not {"He asked the tall Mr.", "The end."} & {*trained, *held_out}
    assert speech.main([str(tmp_path / "out"), f"--hours={5 / 3600}", "--jobs=1"]) == 0
    lines = (tmp_path / "out/recordings.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["speaker"] for row in rows} == {*WARPS}
    assert [row["text"] for row in rows if row["split"] == "test"] == held_out
    for row in rows:
        samples, rate = soundfile.read(tmp_path / "out" / row["audio"])
        assert rate == 16_000 and len(samples) / rate == pytest.approx(0.5, abs=0.01)
        waves = np.count_nonzero(np.diff(np.signbit(samples))) / 2
        assert waves == pytest.approx(100 * WARPS[row["speaker"]], rel=0.05)
        assert np.abs(samples).max() == pytest.approx(0.7, rel=0.01)
    with tarfile.open(tmp_path / "out/new_voice.tar") as tar:
        abouts = [json.load(tar.extractfile(name)) for name in tar.getnames()[1::2]]
    assert [about["split"] for about in abouts] == ["train"] * 2 + ["test"] * 2  # a second of each
    spoken = " ".join(row["text"] for row in rows if row["split"] == "train")
    assert not any(about["text"] in spoken for about in abouts)
    flite.unlink()  # what is there is not said again
    assert speech.main([str(tmp_path / "out"), f"--hours={5 / 3600}", "--jobs=1"]) == 0
