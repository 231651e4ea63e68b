"""Speaks the corpus: sentences of the grammar in flite's voices, and prepares it as a user would.

    python -m benchmarks.sentences.corpus --hours 5       # outputs/sentences/5h

Sizes contain each other: the recordings of 1 hour are the first of those of 5. Held out are sentences that training
has not, sentences with a word that it never hears (both in its voices), and a voice that it never hears. What
is there is not spoken again.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile
from tqdm import tqdm

from benchmarks.common import ROOT
from benchmarks.sentences.grammar import sentences
from torchtitan.models.dit_tts.errors import InputError, report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.audio import resample

FOLDER = ROOT / "outputs/sentences"


@dataclass(frozen=True)
class Voice:
    """A voice of flite, spoken slower by `warp` and then played faster by it: pitch and formants are higher by
    this factor, the speed is as before."""

    name: str
    flite: str
    warp: float = 1.0


# Of the nine that were tried, those in which the referee hears 1.7 to 3.1 % of the words wrong; kal16 and slt
# played slower or faster than here reach 10 and 23 %.
VOICES = (
    Voice("slt", "slt"),
    Voice("rms", "rms"),
    Voice("kal", "kal16"),
    Voice("deep", "slt", 0.88),
)
NEW_VOICE = Voice("awb", "awb")
TESTS = {"heldout": 200, "new_word": 100, "new_voice": 60}
"""set -> its sentences"""

_AT_ONCE = 64


def test_texts(seed: int) -> dict[str, list[str]]:
    return {kind: list(itertools.islice(sentences(seed, kind), n)) for kind, n in TESTS.items()}


def training_texts(seed: int) -> Iterator[str]:
    """Endless, none of the held-out ones."""
    tests = itertools.chain.from_iterable(test_texts(seed).values())
    return sentences(seed, "train", frozenset(tests))


def speak(text: str, voice: Voice, path: Path) -> float:
    """Writes the wave file unless it is there. Returns its seconds."""
    if not path.exists():
        part = path.with_suffix(".part")
        options = ["-voice", voice.flite, "--setf", f"duration_stretch={voice.warp}"]
        subprocess.run(["flite", *options, "-t", text, "-o", part], check=True)
        if voice.warp != 1.0:
            samples, rate = soundfile.read(part, dtype="float32")
            warped = resample(samples, round(rate * voice.warp), rate)
            soundfile.write(part, warped, rate, "PCM_16", format="WAV")
        part.replace(path)
    return float(soundfile.info(path).duration)


def speak_corpus(folder: Path, hours: float, seed: int, jobs: int) -> Path:
    """Writes what is missing of the wave files, and the lists of a size: recordings.jsonl, new_word.jsonl and
    new_voice.jsonl. Returns the size's folder.

    Raises:
        InputError: there is no flite.
    """
    if shutil.which("flite") is None:
        raise InputError("the program flite is missing; install it (Debian: apt-get install flite)")
    wavs, size = folder / "wavs", folder / f"{hours:g}h"
    for each in (wavs, size):
        each.mkdir(parents=True, exist_ok=True)

    def row(kind: str, number: int, text: str) -> dict[str, Any]:
        voice = NEW_VOICE if kind == "new_voice" else VOICES[number % len(VOICES)]
        wav = wavs / f"{kind}-{number:06d}.wav"
        seconds = speak(text, voice, wav)
        split = "train" if kind == "train" else "test"
        about = {"key": wav.stem, "audio": f"../wavs/{wav.name}", "speaker": voice.name}
        return {**about, "text": text, "split": split, "seconds": round(seconds, 3)}

    with ThreadPoolExecutor(jobs) as pool:
        lists = {
            kind: list(_spoken(pool, row, kind, texts)) for kind, texts in test_texts(seed).items()
        }
        recordings, wanted, heard = lists.pop("heldout"), hours * 3600, 0.0
        with tqdm(total=round(wanted), desc="spoken", unit="s", mininterval=5.0) as progress:
            for each in _spoken(pool, row, "train", training_texts(seed)):
                recordings.append(each)
                heard += each["seconds"]
                progress.update(round(heard) - progress.n)
                if heard >= wanted:
                    break
    for name, rows in {"recordings": recordings, **lists}.items():
        lines = (json.dumps(each) + "\n" for each in rows)
        write_atomic(size / f"{name}.jsonl", "".join(lines))
    return size


def _spoken(
    pool: ThreadPoolExecutor,
    row: Callable[[str, int, str], dict[str, Any]],
    kind: str,
    texts: Iterable[str],
) -> Iterator[dict[str, Any]]:
    """Rows in the order of the texts, which may be endless: some at a time."""
    numbered = enumerate(texts)
    while some := list(itertools.islice(numbered, _AT_ONCE)):
        yield from pool.map(lambda each: row(kind, *each), some)


def prepare(size: Path) -> None:
    """size/data (train and heldout), size/new_word and size/new_voice by `titan-tts prepare`, unless they are
    there."""
    for name in ("recordings", "new_word", "new_voice"):
        output = size / ("data" if name == "recordings" else name)
        if not (output / "heldout/prepare.json").is_file():
            command = ["-m", "titan_tts", "prepare", str(size / f"{name}.jsonl"), str(output)]
            command += ["--loudness", "off", "--max-silence", "off", "--overwrite"]
            if name != "recordings":
                command += ["--heldout-fraction", "1"]
            subprocess.run([sys.executable, *command], check=True, cwd=ROOT)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of flite at once")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(args)
    size = speak_corpus(options.folder, options.hours, options.seed, options.jobs)
    prepare(size)
    print(size)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
