"""Runs of recipes: trained and evaluated in processes of one thread each, every one on a core of its own."""

import hashlib
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.quality.recipes import CONFIG, PACKAGE, RECIPES, ROOT, Recipe
from tools.harness.runs import last_line
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import JsonLines, write_atomic
from torchtitan.models.dit_tts.run.launcher import die_with_parent

WORDS = "words:zero,one,two,three,four,five,six,seven,eight,nine"
RESULT, CALIBRATION = "result.json", "calibration.json"
_UNTIMED = 10
"""first steps of a calibration"""

# As scripts/main_job.sh sets them.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Job:
    """One training run and its evaluation."""

    recipe: str
    budget: str
    """steps, or seconds with an s behind them"""

    steps: int
    """at which the schedule of the learning rate ends"""

    seed: int
    """of weights, order, noise and times"""

    lr: float

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.budget}-lr-{self.lr:g}-seed-{self.seed}"


@dataclass(frozen=True)
class Place:
    """Where runs are made and what of.

    Attributes:
        folder: of all runs.
        data: as `titan-tts prepare` writes it.
        noise_seeds: of each text in the evaluation.
        utterances: held-out ones to evaluate on, evenly chosen; 0: all.
    """

    folder: Path
    data: Path
    precision: str
    noise_seeds: int = 2
    utterances: int = 0

    def run_folder(self, job: Job) -> Path:
        return self.folder / job.name


def train_arguments(job: Job, place: Place) -> list[str]:
    """Of Python: one validation and one checkpoint, both at the end."""
    recipe = RECIPES[job.recipe]
    folder = place.run_folder(job)
    settings = {
        **recipe.settings(job.steps),
        "optimizer.lr": job.lr,
        "training.steps": job.steps,
        "training.mixed_precision_param": place.precision,
        "debug.seed": job.seed,
        "data.seed": job.seed,
        "data.path": str(place.data / "train"),
        "job.dump_folder": str(folder.parent),
        "job.experiment": folder.name,
        "validation.freq": job.steps,
        "validation.keep_best": "",
        "checkpoint.interval": job.steps,
    }
    return train_command(recipe, settings)


def train_command(recipe: Recipe, settings: Mapping[str, Any]) -> list[str]:
    """Arguments of Python that train by a recipe's program with these keys over CONFIG."""
    options = []
    for key, value in settings.items():
        if isinstance(value, bool):
            section, _, name = key.partition(".")
            options.append(f"--{section}.{'' if value else 'no_'}{name}")
        else:
            options += [f"--{key}", str(value)]
    plain = recipe.program == PACKAGE
    command = ["train.py"] if plain else [*recipe.program, *recipe.before, "train"]
    config = ["--job.config_file", CONFIG]
    return [*command, *config, *options, "--metrics.no_enable_tensorboard"]


def evaluate_arguments(job: Job, place: Place) -> list[str]:
    recipe, folder = RECIPES[job.recipe], place.run_folder(job)
    return [
        *(*recipe.program, *recipe.before, "evaluate", str(folder)),
        *("--test", str(place.data / "heldout"), "--recognizer", WORDS),
        *("--seeds", str(place.noise_seeds), "--dtype", place.precision),
        *("--out", str(folder / "evaluation"), "--on-page", "0"),
        *("--max-utterances", str(place.utterances)),
    ]


def training_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the steps of a run's metrics.jsonl, without start, validation and checkpoint."""
    before, total = 0, 0.0
    for row in sorted(rows, key=lambda row: row["step"]):
        total += (row["step"] - before) * row["seconds_per_step"]
        before = row["step"]
    return total


def read_run(folder: Path) -> dict[str, Any]:
    """What the files of a finished and evaluated run say."""
    metrics = JsonLines(folder / "metrics.jsonl").read()
    validation = [r for r in JsonLines(folder / "validation.jsonl").read() if "heldout_loss" in r]
    report = json.loads((folder / "evaluation/evaluation.json").read_text())
    [system] = [row for row in report["rows"] if row["kind"] == "system"]
    by_seed = list(zip(*(u["scores"][system["name"]] for u in report["utterances"]), strict=True))
    rates = [
        sum(score["word_errors"] for score in scores) / sum(score["words"] for score in scores)
        for scores in by_seed
    ]
    return {
        "wall_seconds_of_training": training_seconds(metrics),
        "wer": system["figures"]["wer"],
        "wer_by_noise_seed": rates,
        "wer_by_speaker": system["wer_by_speaker"],
        "cer": system["figures"]["cer"]["value"],
        "duration_error": system["figures"]["duration_error"]["value"],
        "weights": system["weights"],
        "heldout_loss": validation[-1]["best_heldout_loss"],
        "text_gain": validation[-1]["text_gain"],
        "training_loss": metrics[-1]["loss"],
        "utterances": len(report["utterances"]),
        "commit": json.loads((folder / "env.json").read_text())["git_commit"],
    }


def collect(place: Place) -> list[dict[str, Any]]:
    """All results in the folder that the recipes of this checkout would make with these settings."""
    found = []
    for path in sorted(place.folder.glob(f"*/*/{RESULT}")):
        with suppress(OSError, ValueError, TypeError):
            job = Job(**json.loads(path.read_text())["job"])
            if job.recipe in RECIPES and (result := finished(job, place)) is not None:
                found.append(result)
    return found


def finished(job: Job, place: Place) -> dict[str, Any] | None:
    """The result of an earlier call with the same settings; None where there is none."""
    try:
        found = json.loads((place.run_folder(job) / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return found if found["arguments"] == _identity(job, place) else None


def _identity(job: Job, place: Place) -> list[str]:
    """What a result depends on: the arguments, without folders, which may move, and the shipped config."""
    config = hashlib.sha256((ROOT / CONFIG).read_bytes()).hexdigest()[:16]
    arguments = [*train_arguments(job, place), *evaluate_arguments(job, place)]
    kept = [each for each in arguments if not each.startswith(str(place.folder))]
    return [*kept, f"{CONFIG}: {config}"]


def do(job: Job, place: Place, core: int) -> dict[str, Any]:
    """Trains and evaluates on a core. A run that broke off is begun again: its time would not be one
    run's.

    Raises:
        InputError: a process fails; the log says why.
    """
    folder = place.run_folder(job)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    began = time.monotonic()
    fractions = []
    with log.open("w") as output:
        for arguments in (train_arguments(job, place), evaluate_arguments(job, place)):
            status, fraction = run_on(core, arguments, output)
            if status:
                raise InputError(f"{job.name}: {last_line(log)} (log: {log})")
            fractions.append(fraction)
    figures = read_run(folder)
    found = {
        "job": asdict(job),
        "arguments": _identity(job, place),
        **figures,
        # Of one thread on one core: those that it would take if no other process had the core, too.
        "seconds": figures["wall_seconds_of_training"] * fractions[0],
        "cpu_fraction": fractions[0],
        "wall_seconds": time.monotonic() - began,
    }
    write_atomic(folder / RESULT, json.dumps(found, indent=1) + "\n")
    for large in (folder / "checkpoint", folder / "evaluation/wavs", folder / "tb"):
        shutil.rmtree(large, ignore_errors=True)
    with suppress(OSError):
        (folder / "evaluation/evaluation.html").unlink()
    return found


def run_on(core: int, arguments: Sequence[str], output: IO[str]) -> tuple[int, float]:
    """Exit status of Python on one core, and CPU seconds over wall seconds: well below 1 where other
    processes had the core, too."""

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        die_with_parent()  # also of a SIGKILL: what is left would disturb the next call's runs

    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    return process.returncode, (usage.ru_utime + usage.ru_stime) / seconds


def step_seconds(job: Job, place: Place, core: int) -> dict[str, Any]:
    """Trains without evaluating; seconds of a step but for the first ones, kept in the folder. For
    budgets in seconds.

    Raises:
        InputError: the training fails.
    """
    folder = place.run_folder(job)
    kept = folder / CALIBRATION
    if not kept.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.log")
        arguments = [*train_arguments(job, place), "--metrics.log_freq", str(_UNTIMED)]
        with log.open("w") as output:
            if run_on(core, [*arguments, "--checkpoint.no_enable"], output)[0]:
                raise InputError(f"{job.name}: {last_line(log)} (log: {log})")
        rows = JsonLines(folder / "metrics.jsonl").read()
        first = training_seconds([row for row in rows if row["step"] <= _UNTIMED])
        seconds = (training_seconds(rows) - first) / (job.steps - _UNTIMED)
        write_atomic(kept, json.dumps({"seconds_per_step": seconds}) + "\n")
    return json.loads(kept.read_text())


class Progress:
    """Prints what is done, and estimates what is left.

    Args:
        planned: (recipe, steps) of every run.
    """

    def __init__(self, planned: Iterable[tuple[str, int]], cores: int):
        self.left = Counter(planned)
        self.total, self.cores = self.left.total(), cores
        self.step_seconds: dict[str, list[float]] = {}
        self.overheads: list[float] = []

    def _expected(self, recipe: str, steps: int) -> float:
        """Wall seconds of a run: by the steps of its recipe or, before its first, of all."""
        everything = [value for values in self.step_seconds.values() for value in values] or [0.1]
        per_step = statistics.fmean(self.step_seconds.get(recipe, everything))
        return steps * per_step + statistics.fmean(self.overheads or [30.0])

    def eta(self) -> str:
        left = (self._expected(*each) * count for each, count in self.left.items())
        seconds = int(sum(left) / self.cores)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def say(self, job: Job, result: Mapping[str, Any], kept: bool) -> None:
        self.left[job.recipe, job.steps] -= 1
        self.step_seconds.setdefault(job.recipe, []).append(result["seconds"] / job.steps)
        self.overheads.append(result["wall_seconds"] - result["seconds"])
        rates = " and ".join(f"{100 * rate:.1f}" for rate in result["wer_by_noise_seed"])
        print(
            f"[{self.total - self.left.total()}/{self.total}] {job.name}: {result['seconds']:.1f} s of "
            f"training, WER {rates} %, held-out loss {result['heldout_loss']:.4f}, text gain "
            f"{result['text_gain']:+.4f}{' (kept)' if kept else ''}  ETA {self.eta()}",
            flush=True,
        )


def run_all(
    jobs: Sequence[Job],
    place: Place,
    cores: Sequence[int],
    progress: Progress | None = None,
    work: Callable[[Job, Place, int], dict[str, Any]] = do,
) -> dict[Job, dict[str, Any]]:
    """The results of jobs: those of earlier calls are kept, the others made, one per core at a time.

    Raises:
        InputError: the first failure, once what has begun is done.
    """
    results: dict[Job, dict[str, Any]] = {}
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    lock = threading.Lock()

    def done(job: Job, result: dict[str, Any], kept: bool) -> None:
        with lock:
            results[job] = result
            if progress is not None:
                progress.say(job, result, kept)

    for job in dict.fromkeys(jobs):
        result = finished(job, place)
        if result is None:
            waiting.put(job)
        else:
            done(job, result, kept=True)
    errors: list[BaseException] = []

    def worker(core: int) -> None:
        while not errors:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done(job, work(job, place, core), kept=False)
            except BaseException as error:  # ends the other workers, too
                errors.append(error)
                return

    threads = [threading.Thread(target=worker, args=(core,), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
