"""How well sentences are read by recipe, hours, steps and size: trainings judged on sentences that were held out.

    python -m benchmarks.sentences.corpus --hours 5
    python -m benchmarks.sentences.trials        # benchmarks/results/sentences.json; 7 minutes a trial and core
    python -m benchmarks.sentences.trials --recipes phones --seeds 0 1 2 --steps 1000 2500

Each trial is one process of one thread on a core of its own. Trials in the result file are not made again.
"""

import argparse
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.common import RESULTS, ROOT, write_report
from benchmarks.sentences.corpus import FOLDER
from benchmarks.sentences.grammar import kept_out, words_of
from tools.harness.runs import last_line
from torchtitan.models.dit_tts.errors import InputError, report_input_errors
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.run.launcher import die_with_parent

RUNS = ROOT / "outputs/sentences_trials"
SETS = {"heldout": "data/heldout", "new_word": "new_word/heldout", "new_voice": "new_voice/heldout"}
REFEREE = "benchmarks.sentences.referee:words"
# Over train_configs/debug.toml, whose limits are those of digits. On a CPU many small batches teach more per second
# than a few large ones: 4 of the longest are 8 of the median length.
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
# Rates are debug's by width; the encoder is that of `small`, which 18M is for.
FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {},
    "18M": {"encoder.n_layers": 3, "encoder.n_heads": 3, "optimizer.base_dim": 192},
}
RECIPES: dict[str, dict[str, Any]] = {"phones": {"encoder.model": "phones:en-us"}, "letters": {}}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "CUDA_VISIBLE_DEVICES": "",
}  # as scripts/from_scratch.sh sets them


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
        return f"{self.flavor}-{self.recipe}-{self.size}-{self.steps}-seed-{self.seed}"


def train_arguments(trial: Trial, corpus: Path, runs: Path) -> list[str]:
    settings = {
        **COMMON,
        **FLAVORS[trial.flavor],
        **RECIPES[trial.recipe],
        "model.flavor": trial.flavor,
        "training.steps": trial.steps,
        "debug.seed": trial.seed,
        "data.seed": trial.seed,
        "data.path": corpus / trial.size / "data/train",
        "validation.freq": trial.steps,
        "validation.samples": 24,
        "checkpoint.interval": trial.steps,
        "job.dump_folder": runs,
        "job.experiment": trial.name,
    }
    options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["train", "debug", *options, "--metrics.no_enable_tensorboard"]


def run_on(core: int, arguments: Sequence[str], output: IO[str]) -> tuple[int, float]:
    """Runs titan-tts on one core. Returns its status, and CPU over wall seconds: below 1 where others had the core."""

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        die_with_parent()

    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_tts", *arguments],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, (usage.ru_utime + usage.ru_stime) / (time.monotonic() - began)


def training_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of the steps in a run's metrics, without start, validation and checkpoints."""
    before, total = 0, 0.0
    for row in rows:
        total += (row["step"] - before) * row["seconds_per_step"]
        before = row["step"]
    return total


def judged(out: Path) -> dict[str, Any]:
    """Figures of an evaluation: word errors of the system and the codec, and how often words that training lacks were
    heard."""
    report = json.loads((out / "evaluation.json").read_text())
    rows = {row["kind"]: row for row in report["rows"]}
    system, codec = (rows[kind]["figures"] for kind in ("system", "codec"))
    new = [
        word in words_of(each["scores"][rows["system"]["name"]][0]["heard"])
        for each in report["utterances"]
        for word in words_of(each["text"])
        if word in kept_out()
    ]
    return {
        "utterances": len(report["utterances"]),
        "wer": system["wer"]["value"],
        "wer_interval": [system["wer"]["low"], system["wer"]["high"]],
        "codec_wer": codec["wer"]["value"],
        "similarity": system["speaker_similarity"]["value"],
        "codec_similarity": codec["speaker_similarity"]["value"],
        **({"new_words_heard": sum(new) / len(new)} if new else {}),
    }


def make(trial: Trial, options: argparse.Namespace, core: int) -> dict[str, Any]:
    """Trains on a core, speaks the chosen sets there, and judges them.

    Raises:
        InputError: a process fails; its log says why.
    """
    corpus, runs = options.corpus.resolve(), options.runs.resolve()
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
        for name in options.sets:
            out, test = folder / "evaluation" / name, corpus / trial.size / SETS[name]
            where = ["evaluate", folder, "--test", test, "--out", out, "--on-page", 0, "--seeds", 1]
            how = ["--recognizer", REFEREE, "--speaker-scorer", "own", "--dtype", "float32"]
            run([*map(str, where), *how, "--max-utterances", str(options.utterances)])
            sets[name] = judged(out)
    wall = training_seconds(JsonLines(folder / "metrics.jsonl").read())
    commit = json.loads((folder / "env.json").read_text())["git_commit"]
    return {"trial": asdict(trial), "sets": sets, "core_seconds": wall * fraction, "commit": commit}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["phones", "letters"], choices=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", nargs="+", type=int, default=[2500])
    parser.add_argument("--sizes", nargs="+", default=["5h"])
    parser.add_argument("--flavors", nargs="+", default=["debug"], choices=FLAVORS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--utterances", type=int, default=100, help="of each set; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--corpus", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--out", type=Path, default=RESULTS / "sentences.json")
    options = parser.parse_args(args)
    axes = (options.seeds, options.sizes, options.flavors, options.steps, options.recipes)
    trials = [
        Trial(r, steps, seed, size, f) for seed, size, f, steps, r in itertools.product(*axes)
    ]
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    done = [row["trial"] for row in rows]
    left = [trial for trial in trials if asdict(trial) not in done]
    cores: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in range(options.jobs):
        cores.put(core)

    def work(trial: Trial) -> dict[str, Any]:
        core = cores.get()
        try:
            return make(trial, options, core)
        finally:
            cores.put(core)

    print(f"{len(left)} trials to make, {len(trials) - len(left)} in {options.out}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(work, left):
            rows.append(row)
            write_report(options.out, {"rows": rows})
            words = ", ".join(f"{name} {each['wer']:.1%}" for name, each in row["sets"].items())
            print(f"{row['trial']}: {row['core_seconds']:.0f} s, words wrong: {words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
