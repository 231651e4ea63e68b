"""A fifth voice from minutes of speech: all weights, low-rank updates, or a learned reference, side by side.

python -m benchmarks.sentences.trials --recipes phones           # a base of four voices
titan-tts export outputs/sentences_trials/debug-phones-5h-2500-seed-0 outputs/sentences_base
python -m benchmarks.sentences.adapt outputs/sentences_base       # benchmarks/results/adapt.json; 4 minutes a row and core

Each row is what `titan-tts finetune` does by its defaults, judged on sentences of the new voice and of the old ones
that no run has heard. An inversion leaves the network as it is, so old voices are the base's and only the new one is judged.
Rows in the result file are not made again.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sentences.corpus import FOLDER, NEW_VOICE, ROOT, speak
from benchmarks.sentences.grammar import sentences
from benchmarks.sentences.inversion import METHODS as INVERSIONS
from benchmarks.sentences.inversion import invert, judge
from benchmarks.sentences.trials import REFEREE, SETS
from titan_tts.evaluate.systems import own_voice
from titan_tts.speak.load_run import load_run
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.speech.scoring.interface import SpeakerScorer
from torchtitan.models.dit_tts.speech.scoring.speaker_similarity import own_scorer

RESULTS = ROOT / "benchmarks/results/adapt.json"
RUNS = ROOT / "outputs/sentences_adapted"
METHODS = ("full", "full, kept", "lora", *INVERSIONS)
FIGURES = ("wer", "speaker_similarity")
JUDGED = {"new voice": SETS["new_voice"], "old voices": SETS["heldout"]}


@dataclass(frozen=True)
class Row:
    method: str
    minutes: float
    seed: int
    """of order, noise, times and new weights"""


def base_voice(device: str, base: str) -> SpeakerScorer:
    """The scorer of every row: the base's speaker encoder, as a fine-tuned one hears otherwise."""
    return own_scorer(own_voice(load_run(base)))


def titan_tts(*arguments: object) -> None:
    command = [sys.executable, "-m", "titan_tts", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT)


def record(folder: Path, minutes: float) -> Path:
    """A list of so many minutes of the new voice; fewer minutes are the first of more."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, heard = [], 0.0
    for number, text in enumerate(sentences(1, "train")):
        wav = folder / f"{number:04d}.wav"
        heard += speak(text, NEW_VOICE, wav)
        rows.append({"audio": wav.name, "text": text, "speaker": NEW_VOICE.name})
        if heard >= 60 * minutes:
            break
    path = folder / f"{minutes:g}min.jsonl"
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluated(
    system: str, folder: Path, base: Path, corpus: Path, utterances: int
) -> dict[str, Any]:
    """Figures with their intervals, of the system and of the codec, by set."""
    found: dict[str, Any] = {}
    for name, path in JUDGED.items():
        out = folder / name.replace(" ", "_")
        options = [
            "--recognizer",
            REFEREE,
            "--speaker-scorer",
            f"benchmarks.sentences.adapt:base_voice:{base}",
            "--seeds",
            1,
            "--on-page",
            0,
        ]
        options += ["--max-utterances", utterances, "--dtype", "float32"]
        titan_tts("evaluate", system, "--test", corpus / path, "--out", out, *options)
        rows = json.loads((out / "evaluation.json").read_text())["rows"]
        for row in rows:
            if row["kind"] in ("system", "codec"):
                kept = {key: row["figures"][key] for key in FIGURES}
                found[f"{name}, {row['kind']}"] = kept
    return found


def make(row: Row, base: Path, corpus: Path, runs: Path, utterances: int) -> dict[str, Any]:
    name = f"{row.method.replace(', ', '_')}-{row.minutes:g}-{row.seed}"
    folder = runs / name
    shutil.rmtree(folder, ignore_errors=True)
    recordings = record(runs / "recordings", row.minutes)
    if row.method in INVERSIONS:
        options = ["--language", "en", "--heldout-fraction", 0.2, "--codec", "mel_dct"]
        options += ["--loudness", "off", "--max-silence", "off"]  # as the base's data
        titan_tts("prepare", recordings, folder / "data", *options)
        learned, _ = invert(base, folder / "data", INVERSIONS[row.method], row.seed)
        judged, voices = corpus / JUDGED["new voice"], base_voice("", str(base))
        figures = judge(base, learned, judged, utterances, voices)
        return {"new voice, system": {key: figures[key] for key in FIGURES}}
    method, _, kept = row.method.partition(", ")
    options = ["--method", method, "--language", "en", "--heldout-fraction", 0.2]
    options += ["--keep", corpus / "data/train"] if kept else []
    options += ["--training.mixed_precision_param", "float32"]
    options += ["--data.seed", row.seed, "--debug.seed", row.seed]
    titan_tts("finetune", base, recordings, folder, *options)
    return evaluated(f"{folder / 'run'}@best", folder, base, corpus, utterances)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path, help="exported; trained on the four voices")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--minutes", nargs="+", type=float, default=[1, 5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--utterances", type=int, default=60, help="of each set")
    parser.add_argument("--corpus", type=Path, default=FOLDER / "5h")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    base, corpus, runs = (each.resolve() for each in (options.base, options.corpus, options.runs))
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []

    def add(about: dict[str, Any], figures: dict[str, Any]) -> None:
        conditions = environment()
        del conditions["command"]  # has the paths of this machine
        rows.append({**about, "figures": figures, "commit": conditions["git_commit"]})
        content = {"utterances": options.utterances, "rows": rows, "conditions": conditions}
        write_atomic(options.out, json.dumps(content, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)

    if not any(row["method"] == "base" for row in rows):
        found = evaluated(str(base), runs / "base", base, corpus, options.utterances)
        add({"method": "base"}, found)
    done = [tuple(row.get(key) for key in ("method", "minutes", "seed")) for row in rows]
    for seed, minutes, method in itertools.product(options.seeds, options.minutes, options.methods):
        row = Row(method, minutes, seed)
        if (method, minutes, seed) not in done:
            add(asdict(row), make(row, base, corpus, runs, options.utterances))
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
