"""Trains recipes on the embedded corpus for several budgets, and compares word error rates over seconds.

    scripts/setup.sh speech
    python benchmarks/time_to_quality.py                      # 2 cores, two hours; killed, it continues
    python benchmarks/time_to_quality.py --only f5 --budgets 2000
    python benchmarks/time_to_quality.py --report             # of what has run, trains nothing

Each run is one of `train.py` (or, for the in-fill model, of the same trainer with another model and objective)
whose learning rate ends at its budget, on one thread of a core of its own. A recipe first runs with half,
once and twice the shipped rate at the smallest budget and one seed; the best rate is then taken for all seeds and
budgets. Every run says the held-out texts with two noise seeds to a recognizer that knows the ten words.

Seconds are CPU seconds of the training's steps, without start, validation and checkpoint.

Runs that are done are kept in outputs/time_to_quality and not repeated; the report is of all that are there.
Writes benchmarks/results/time_to_quality.json, .png and .svg, and prints the table of benchmarks/README.md;
exit status 1 where the shipped recipe misses its aim beside the peers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # of the CPU

from benchmarks.quality import figures  # noqa: E402
from benchmarks.quality.jobs import (  # noqa: E402
    Job,
    Place,
    Progress,
    collect,
    run_all,
    step_seconds,
)
from benchmarks.quality.recipes import PEERS, RECIPES, shipped  # noqa: E402
from torchtitan.models.dit_tts.errors import InputError, report_input_errors  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402

CORPUS = ROOT / "assets/spoken_digits/spoken_digits.tar"
RESULTS = ROOT / "benchmarks/results/time_to_quality.json"
BUDGETS = ("300", "600", "1000")
SEEDS = (0, 1, 2)
FACTORS = (0.5, 1.0, 2.0)
"""of the shipped rate, in the sweep of every recipe"""

CALIBRATION_STEPS = 60


def main(args: list[str]) -> int:
    options = parse(args)
    place = Place(
        options.work.resolve(),
        options.data.resolve(),
        precision(options.precision),
        options.noise_seeds,
        options.utterances,
    )
    if not (place.data / "heldout").is_dir():
        prepare(place.data)
    if not options.report:
        names = [name for name in options.only or options.recipes or RECIPES if may_run(name)]
        train(names, options, place)
    report = build(collect(place), options, place)
    if not report["recipes"]:
        raise InputError(f"{place.folder} has no run to report; call it without --report first")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out, json.dumps(report, indent=1) + "\n")
    from benchmarks.quality.picture import picture

    drawn = picture(report)
    options.out.with_suffix(".png").write_bytes(drawn["png"])
    options.out.with_suffix(".svg").write_text(drawn["svg"])
    print(f"\n{figures.table(report)}\n")
    return say(report, options.out)


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, metavar="RECIPE")
    parser.add_argument("--only", action="append", choices=RECIPES, metavar="RECIPE")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of the training")
    parser.add_argument(
        "--budgets", nargs="+", default=BUDGETS, help="steps, or seconds such as 60s"
    )
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS, help="of the rate")
    parser.add_argument("--sweep-budget", default=BUDGETS[0], help="budget of the sweep of rates")
    parser.add_argument("--sweep-seed", type=int, default=SEEDS[0])
    parser.add_argument("--noise-seeds", type=int, default=2, help="per text in the evaluation")
    parser.add_argument("--utterances", type=int, default=0, help="to evaluate on; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on its core")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--data", type=Path, default=ROOT / "outputs/data/spoken_digits")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs/time_to_quality")
    parser.add_argument("--report", action="store_true", help="trains nothing")
    parser.add_argument("--list", action=ListRecipes, nargs=0, help="the recipes, and end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; pictures lie beside it")
    return parser.parse_args(args)


class ListRecipes(argparse.Action):
    def __call__(self, parser: Any, *rest: Any) -> None:
        for name, recipe in RECIPES.items():
            why = recipe.why_not()
            print(f"{name}: {recipe.about}{f' (left out: {why})' if why else ''}")
        parser.exit()


def precision(wanted: str) -> str:
    """bfloat16 on CPUs that compute it, as scripts/main_job.sh chooses."""
    if wanted != "auto":
        return wanted
    cpu = Path("/proc/cpuinfo")
    known = cpu.is_file() and re.search("amx_bf16|avx512_bf16", cpu.read_text())
    return "bfloat16" if known else "float32"


def prepare(data: Path) -> None:
    """As scripts/main_job.sh prepares the corpus."""
    options = ["--loudness", "off", "--max-silence", "off", "--overwrite"]
    command = [sys.executable, "-m", "titan_tts", "prepare", str(CORPUS), str(data), *options]
    subprocess.run(command, cwd=ROOT, check=True)


def may_run(name: str) -> bool:
    why = RECIPES[name].why_not()
    if why:
        print(f"{name} is left out: {why}")
    return not why


def train(names: list[str], options: argparse.Namespace, place: Place) -> None:
    """All runs: first the sweeps of all recipes, then seeds and budgets at the best rates."""
    cores = sorted(os.sched_getaffinity(0))[: options.jobs]
    if len(cores) < options.jobs:
        raise InputError(f"--jobs {options.jobs}, but this process may use {len(cores)} cores")
    steps = budget_steps(names, options, place, cores)

    def job(name: str, budget: str, seed: int, lr: float) -> Job:
        return Job(name, budget, steps[name, budget], seed, lr)

    base = float(shipped("optimizer.lr"))
    sweep = {
        name: [
            job(name, options.sweep_budget, options.sweep_seed, base * factor)
            for factor in options.factors
        ]
        for name in names
    }
    others = {
        (name, budget, seed)
        for name in names
        for budget in options.budgets
        for seed in options.seeds
        if (budget, seed) != (options.sweep_budget, options.sweep_seed)
    }
    planned = [(each.recipe, each.steps) for jobs in sweep.values() for each in jobs]
    planned += [(name, steps[name, budget]) for name, budget, _ in others]
    progress = Progress(planned, len(cores))
    swept = run_all([each for jobs in sweep.values() for each in jobs], place, cores, progress)
    best = {name: figures.best_rate([swept[each] for each in jobs]) for name, jobs in sweep.items()}
    for name, lr in best.items():
        print(f"{name}: learning rate {lr:g}", flush=True)
    # A seed of every recipe and budget before the next: what is there compares at any time.
    order = sorted(others, key=lambda each: (each[2], steps[each[0], each[1]]))
    run_all([job(*each, best[each[0]]) for each in order], place, cores, progress)


def budget_steps(
    names: list[str], options: argparse.Namespace, place: Place, cores: list[int]
) -> dict[tuple[str, str], int]:
    """(recipe, budget) -> steps. For budgets in seconds each recipe's step is timed first.

    Raises:
        InputError: a budget that is neither.
    """
    budgets = dict.fromkeys([*options.budgets, options.sweep_budget])
    for budget in budgets:
        if not re.fullmatch(r"[1-9]\d*s?", budget):
            raise InputError(
                f"--budgets {budget}: give steps, such as 600, or seconds, such as 60s"
            )
    per_step: dict[str, float] = {}
    if any(budget.endswith("s") for budget in budgets):
        base = float(shipped("optimizer.lr"))
        jobs = [Job(name, "calibration", CALIBRATION_STEPS, SEEDS[0], base) for name in names]
        timed = run_all(jobs, place, cores, work=step_seconds)
        per_step = {job.recipe: found["seconds_per_step"] for job, found in timed.items()}
        print("seconds per step:", ", ".join(f"{n} {s:.4f}" for n, s in per_step.items()))
    return {
        (name, budget): max(1, round(int(budget[:-1]) / per_step[name]))
        if budget.endswith("s")
        else int(budget)
        for name in names
        for budget in budgets
    }


def build(runs: list[dict[str, Any]], options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """The report of all runs that are there."""
    from torchtitan.models.dit_tts.run.run_folder import environment

    recipes = {}
    for name, recipe in RECIPES.items():
        own = [run for run in runs if run["job"]["recipe"] == name]
        sweep = [
            run
            for run in own
            if run["job"]["budget"] == options.sweep_budget
            and run["job"]["seed"] == options.sweep_seed
        ]
        if not sweep:
            continue
        lr = figures.best_rate(sweep)
        at_best = [run for run in own if run["job"]["lr"] == lr]
        about = {"about": recipe.about, "keys": recipe.settings(at_best[0]["job"]["steps"])}
        recipes[name] = about | figures.of_recipe(at_best, sweep)
    return {
        "recipes": recipes,
        "against_shipped": figures.against(recipes),
        "against_peers": figures.against_peers(recipes, PEERS),
        "settings": {
            "precision": place.precision,
            "threads": 1,
            "runs_at_once": options.jobs,
            "noise_seeds": place.noise_seeds,
            "utterances": runs[0]["utterances"] if runs else 0,
            "sweep_budget": options.sweep_budget,
        },
        "conditions": environment(),
        # Arguments name folders of this machine; "job" says what was run.
        "runs": [{k: v for k, v in run.items() if k != "arguments"} for run in runs],
    }


def say(report: dict[str, Any], out: Path) -> int:
    """The aim, and what disturbed the figures. Returns the exit status."""
    disturbed = [name for name, each in report["recipes"].items() if each["cpu_fraction"] < 0.9]
    if disturbed:
        print(f"note: other processes had the cores, too, in runs of {', '.join(disturbed)}")
    commits = {run["commit"] for run in report["runs"]}
    if len(commits) > 1:
        print(f"warning: the runs are of {len(commits)} commits; begin anew with another --work")
    for name, each in report["recipes"].items():
        if each["lr_at_edge_of_sweep"]:
            print(f"note: the best rate of {name}, {each['lr']:g}, is at the edge of its sweep")
    found = report["against_peers"]
    if found["ratio"] is not None:
        other = "" if found["peer_arrives"] else "not within "
        print(
            f"seconds to {figures.TARGETS[0]:.0%} WER: shipped {found['shipped_seconds']:.0f}, "
            f"{found['peer']} {other}{found['peer_seconds']:.0f}; ratio {other and 'at most '}"
            f"{found['ratio']:.2f}, aim {found['aim']:.2f}: {found['verdict']}"
        )
    if found["verdict"] == "not shown":
        print("the aim beside the peers is not shown: run shipped and peers, at longer --budgets")
    print(f"{out}, .png, .svg")
    return 1 if found["verdict"] == "missed" else 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
