"""Which recipe makes sentences become speech: trainings of equal steps, judged on sentences that were held out.

python -m benchmarks.sentences.corpus --hours 5
python -m benchmarks.sentences.trials                    # benchmarks/results/sentences.json; 15 minutes a trial and core
python -m benchmarks.sentences.trials --recipes phones --seeds 0 1 2 --steps 2500 5000

Each trial is one process of one thread on a core of its own. Trials in the result file are not made again.
"""

import argparse
import json
import queue
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from benchmarks.quality.jobs import run_on, train_command, training_seconds
from benchmarks.quality.recipes import INFILL, PEERS, SWITCHES, Recipe
from benchmarks.quality.recipes import RECIPES as PEER_RECIPES
from benchmarks.sentences.check_referee import errors, hear
from benchmarks.sentences.corpus import FOLDER, ROOT
from benchmarks.sentences.grammar import kept_out, words_of
from tools.harness.runs import last_line
from torchtitan.models.dit_tts.errors import InputError, report_input_errors
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

RESULTS = ROOT / "benchmarks/results/sentences.json"
RUNS = ROOT / "outputs/sentences_trials"
SETS = {"heldout": "data/heldout", "new_word": "new_word/heldout", "new_voice": "new_voice/heldout"}
REFEREE = "benchmarks.sentences.referee:words"

# Over CONFIG, whose limits are those of digits. Few large batches instead of many small ones teach less per second
# on a CPU: 4 is the median of 8 samples a step that CONFIG's buckets make of it.
COMMON = {
    "data.max_frames": 192,
    "data.max_speaker_frames": 128,
    "data.max_text_tokens": 160,
    "data.num_buckets": 8,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "ema.decays": "0.99,0.999",
    "lr_scheduler.decay_ratio": 1.0,
}
# Rates are debug's by width; encoders are those of `small` and `one_gpu`, which these flavors are for.
_FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {},
    "18M": {"encoder.n_layers": 3, "encoder.n_heads": 3, "optimizer.base_dim": 192},
    "60M": {"encoder.n_layers": 4, "encoder.n_heads": 4, "optimizer.base_dim": 192},
}
PHONES = {"encoder.model": "phones:en-us"}
_NO_PLACES = {"model.text_positions": "none"}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("phones", "", PHONES),
        Recipe("letters", ""),
        Recipe("letters without places", "", _NO_PLACES),
        Recipe("phones without places", "", {**PHONES, **_NO_PLACES}),
        *(
            Recipe(f"phones, {name}", "", {**PHONES, **SWITCHES[name]})
            for name in ("muon", "logit_mean_0", "drawn_references")
        ),
        *(PEER_RECIPES[name] for name in PEERS),
    )
}
"""By name; their keys are over CONFIG and the limits above"""


@dataclass(frozen=True)
class Trial:
    recipe: str
    steps: int
    seed: int
    """of weights, order, noise and times"""

    size: str
    """of the corpus, such as 5h"""

    flavor: str

    @property
    def name(self) -> str:
        recipe = self.recipe.replace(" ", "_")
        return f"{self.flavor}-{recipe}-{self.size}-{self.steps}-seed-{self.seed}"


def train_arguments(trial: Trial, corpus: Path, runs: Path) -> list[str]:
    recipe = RECIPES[trial.recipe]
    settings = {
        **COMMON,
        **_FLAVORS[trial.flavor],
        **recipe.settings(trial.steps),
        "model.flavor": trial.flavor,
        "training.steps": trial.steps,
        "debug.seed": trial.seed,
        "data.seed": trial.seed,
        "data.path": corpus / trial.size / "data/train",
        "validation.freq": max(1, trial.steps // 2),
        "validation.samples": 24,
        "checkpoint.interval": trial.steps,
        "job.dump_folder": runs,
        "job.experiment": trial.name,
    }
    return train_command(recipe, settings)


def judge(task: tuple[str, Path]) -> dict[str, float]:
    """Errors of a file beside its text, and how many words that training lacks it has and were heard."""
    torch.set_num_threads(1)
    text, path = task
    samples, rate = soundfile.read(path, dtype="float32")
    sound = Sound(torch.from_numpy(samples), rate)
    new = [word for word in words_of(text) if word in kept_out()]
    heard = words_of(hear(sound)) if new else []
    found = asdict(errors(text, sound))
    return found | {"new_words": len(new), "new_heard": sum(word in heard for word in new)}


def interval(found: Sequence[Mapping[str, float]], wrong: str, of: str) -> tuple[float, float]:
    """95 % of the rate in texts drawn anew, with all utterances of a text together."""
    totals: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for each in found:
        totals[str(each["text"])] += (each[wrong], each[of])
    texts = np.array(list(totals.values()))
    drawn = texts[np.random.default_rng(0).integers(0, len(texts), (2000, len(texts)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return float(low), float(high)


def figures(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    total = {name: sum(each[name] for each in found) for name in found[0] if name != "text"}
    report = {
        "utterances": len(found),
        "wer": total["word_errors"] / total["words"],
        "wer_interval": interval(found, "word_errors", "words"),
        "phone_errors": total["phone_errors"] / total["phones"],
    }
    if total["new_words"]:
        report["new_words_heard"] = total["new_heard"] / total["new_words"]
    return report


def make(
    trial: Trial, corpus: Path, runs: Path, chosen: Sequence[str], utterances: int, core: int
) -> dict[str, Any]:
    """Trains on a core, speaks the chosen sets there, and judges them.

    Raises:
        InputError: a process fails; its log says why.
    """
    folder, log = runs / trial.name, runs / f"{trial.name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    runs.mkdir(parents=True, exist_ok=True)

    def run(arguments: Sequence[str]) -> float:
        status, fraction = run_on(core, arguments, output)
        if status:
            raise InputError(f"{trial.name}: {last_line(log)} (log: {log})")
        return fraction

    sets: dict[str, Any] = {}
    with log.open("w") as output:
        fraction = run(train_arguments(trial, corpus, runs))
        for name in chosen:
            out, test = folder / "evaluation" / name, corpus / trial.size / SETS[name]
            recipe, data = RECIPES[trial.recipe], corpus / trial.size / "data/train"
            arguments = [*recipe.program, *recipe.before, "evaluate", str(folder)]
            for option, value in {
                "test": test,
                "out": out,
                "data": data,
                "recognizer": REFEREE,
                "dtype": "float32",
                "seeds": 1,
                "on-page": 0,
                "max-utterances": utterances,
            }.items():
                arguments += [f"--{option}", str(value)]
            if recipe.program != INFILL:  # which has no speaker encoder
                arguments += ["--speaker-scorer", "own"]
            run(arguments)
            sets[name] = _judged(out)
    metrics = JsonLines(folder / "metrics.jsonl").read()
    validation = [r for r in JsonLines(folder / "validation.jsonl").read() if "heldout_loss" in r]
    wall = training_seconds(metrics)
    shutil.rmtree(folder / "checkpoint")
    return {
        "trial": asdict(trial),
        "sets": sets,
        "core_seconds": wall * fraction,
        "heldout_loss": validation[-1]["heldout_loss"],
        "text_gain": validation[-1]["text_gain"],
        "commit": json.loads((folder / "env.json").read_text())["git_commit"],
    }


def _judged(out: Path) -> dict[str, Any]:
    """Figures of an evaluation: of the system and of the codec."""
    report = json.loads((out / "evaluation.json").read_text())
    rows = {row["kind"]: row for row in report["rows"]}
    texts = {each["key"]: each["text"] for each in report["utterances"]}
    [folder] = (out / "wavs").glob("*/seed-0")
    with ProcessPoolExecutor(1) as pool:
        found = list(
            pool.map(judge, [(text, folder / f"{key}.wav") for key, text in texts.items()])
        )
    judged = [each | {"text": text} for each, text in zip(found, texts.values(), strict=True)]
    similar = {kind: row["figures"]["speaker_similarity"] for kind, row in rows.items()}
    return figures(judged) | {
        "codec_wer": rows["codec"]["figures"]["wer"]["value"],
        "similarity": similar["system"] and similar["system"]["value"],
        "codec_similarity": similar["codec"] and similar["codec"]["value"],
    }


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["phones", "letters"], choices=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", nargs="+", type=int, default=[2500])
    parser.add_argument("--sizes", nargs="+", default=["5h"])
    parser.add_argument("--flavors", nargs="+", default=["debug"], choices=_FLAVORS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--utterances", type=int, default=100, help="of each set; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--corpus", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    trials = [
        Trial(recipe, steps, seed, size, flavor)
        for seed in options.seeds
        for size in options.sizes
        for flavor in options.flavors
        for steps in options.steps
        for recipe in options.recipes
    ]
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    done = {json.dumps(row["trial"]) for row in rows}
    left = [trial for trial in trials if json.dumps(asdict(trial)) not in done]
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in range(options.jobs):
        cores.put(core)

    def work(trial: Trial) -> dict[str, Any]:
        core = cores.get()
        try:
            folders = options.corpus.resolve(), options.runs.resolve()
            return make(trial, *folders, options.sets, options.utterances, core)
        finally:
            cores.put(core)

    print(f"{len(left)} trials to make, {len(trials) - len(left)} in {options.out}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(work, left):
            rows.append(row)
            conditions = environment()
            del conditions["command"]  # has the paths of this machine
            content = {"rows": rows, "conditions": conditions}
            write_atomic(options.out, json.dumps(content, indent=1) + "\n")
            words = ", ".join(f"{name} {each['wer']:.1%}" for name, each in row["sets"].items())
            print(f"{row['trial']}: {row['core_seconds']:.0f} s, words wrong: {words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
