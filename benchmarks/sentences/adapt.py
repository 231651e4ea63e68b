"""A fifth voice from minutes of speech: all weights, all weights with kept voices, or low-rank updates, side by side.

    python -m benchmarks.sentences.trials --recipes phones           # a base of four voices
    titan-tts export outputs/sentences_trials/debug-phones-5h-2500-seed-0 outputs/sentences_base
    python -m benchmarks.sentences.adapt outputs/sentences_base      # benchmarks/results/adapt.json; 4 minutes a row

Each row is what `titan-tts finetune` does by its defaults, judged on sentences of the new voice and of the old ones
that no run has heard. Rows in the result file are not made again.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, write_report
from benchmarks.sentences.corpus import FOLDER, NEW_VOICE, speak
from benchmarks.sentences.grammar import sentences
from benchmarks.sentences.trials import REFEREE, SETS
from titan_tts.evaluate.systems import own_voice
from titan_tts.speak.load_run import load_run
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.scoring.interface import SpeakerScorer
from torchtitan.models.dit_tts.speech.scoring.speaker_similarity import own_scorer

METHODS = ("full", "full, kept", "lora")
FIGURES = ("wer", "speaker_similarity")
JUDGED = {"new voice": SETS["new_voice"], "old voices": SETS["heldout"]}


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


def evaluated(system: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures with their intervals, of the system and of the codec, by set."""
    scorer = f"benchmarks.sentences.adapt:base_voice:{options.base.resolve()}"
    found: dict[str, Any] = {}
    for name, path in JUDGED.items():
        out = folder / name.replace(" ", "_")
        where = ["--test", options.corpus.resolve() / path, "--out", out, "--on-page", 0]
        scorers = ["--recognizer", REFEREE, "--speaker-scorer", scorer, "--seeds", 1]
        more = ["--max-utterances", options.utterances, "--dtype", "float32"]
        titan_tts("evaluate", system, *where, *scorers, *more)
        for row in json.loads((out / "evaluation.json").read_text())["rows"]:
            if row["kind"] in ("system", "codec"):
                kept = {key: row["figures"][key] for key in FIGURES}
                found[f"{name}, {row['kind']}"] = kept
    return found


def make(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    name = f"{row['method'].replace(', ', '_')}-{row['minutes']:g}-{row['seed']}"
    folder = options.runs.resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    recordings = record(options.runs.resolve() / "recordings", row["minutes"])
    method, _, kept = row["method"].partition(", ")
    how = ["--method", method, "--language", "en", "--heldout-fraction", 0.2]
    how += ["--keep", options.corpus.resolve() / "data/train"] if kept else []
    how += ["--training.mixed_precision_param", "float32"]
    how += ["--data.seed", row["seed"], "--debug.seed", row["seed"]]
    titan_tts("finetune", options.base.resolve(), recordings, folder, *how)
    return evaluated(f"{folder / 'run'}@best", folder, options)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path, help="exported; trained on the four voices")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--minutes", nargs="+", type=float, default=[1, 5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--utterances", type=int, default=60, help="of each set")
    parser.add_argument("--corpus", type=Path, default=FOLDER / "5h")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs/sentences_adapted")
    parser.add_argument("--out", type=Path, default=RESULTS / "adapt.json")
    options = parser.parse_args(args)
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    done = [{key: row[key] for key in ("method", "minutes", "seed") if key in row} for row in rows]
    axes = itertools.product(options.seeds, options.minutes, options.methods)
    wanted = [{"method": m, "minutes": minutes, "seed": seed} for seed, minutes, m in axes]
    for row in [{"method": "base"}, *wanted]:
        if row in done:
            continue
        if row["method"] == "base":
            base = options.base.resolve()
            figures = evaluated(str(base), options.runs.resolve() / "base", options)
        else:
            figures = make(row, options)
        rows.append({**row, "figures": figures})
        write_report(options.out, {"utterances": options.utterances, "rows": rows})
        print(json.dumps(rows[-1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
