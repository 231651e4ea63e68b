"""Collected folders and lists of segments, small."""

import json
from pathlib import Path

import numpy as np
import soundfile

from tests.helpers.speech_corpora import tone

FILE, RATE = "00112233445566ff", 16_000


def segment_id(number: int) -> str:
    return f"{FILE}-{1000 * number:08d}-{1000 * number + 500:08d}"


def write_collected(output: Path, agreements: list[float]) -> Path:
    """What `titan-tts collect` writes for one recording, without models: a segment of half a second for each agreement,
    whose tone has 100 Hz more than the one before."""
    from titan_tts.collect.analyze import Segment
    from titan_tts.collect.folder import open_folder, write_names, write_recording

    output.mkdir(parents=True)
    open_folder(output, {"speaker_threshold": 0.8})
    figures = dict(snr_db=30.0, clipped=0.0, loudness=-20.0, chars_per_second=12.0)
    segments = [
        Segment(
            **dict(start=float(number), stop=number + 0.5, agreement=agreement, language="en"),
            **dict(text=f"Text {number}.", text_verbatim=f"uh text {number}", **figures),
            embedding=np.eye(4, dtype=np.float32)[0],
            waveform=tone(0.5, hertz=300 + 100 * number),
        )
        for number, agreement in enumerate(agreements)
    ]
    write_recording(output, FILE, output / "partial/t", segments, float(len(segments)), RATE)
    write_names(output, {FILE: "talk.mp3"})
    return output


def write_list(folder: Path, count: int, **columns: object) -> Path:
    """list.jsonl of tones of half a second, with a key and a text each."""
    lines = []
    for number in range(count):
        soundfile.write(folder / f"{number}.wav", tone(0.5, hertz=300 + 100 * number), RATE)
        row = {"key": f"k{number}", "audio": f"{number}.wav", "text": f"text {number}", **columns}
        lines.append(json.dumps(row) + "\n")
    (folder / "list.jsonl").write_text("".join(lines))
    return folder / "list.jsonl"
