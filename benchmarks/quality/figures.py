"""What the runs say: means and ranges over training seeds, seconds to a word error rate, ties.

A difference between two recipes that is not larger than the larger of their ranges over seeds is a tie.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

TARGETS = (0.10, 0.02)
"""word error rates"""

AIM = 1 / 3
"""seconds of the shipped recipe to the first target, over those of the better peer"""

Run = Mapping[str, Any]
Point = tuple[float, float]
"""(training seconds, word error rate)"""


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, least, largest and number of values."""
    return {
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "seeds": len(values),
    }


def seconds_to(points: Sequence[Point], target: float) -> tuple[float | None, str]:
    """Seconds at which a word error rate first is at or below a target.

    Between two budgets the rate is taken to fall evenly over the logarithm of the seconds.

    Returns:
        (seconds, "") between two budgets; (those of the first budget, "at most") where it is reached there
        already; (None, "not reached").
    """
    points = sorted(points)
    before: Point | None = None
    for seconds, rate in points:
        if rate <= target:
            if before is None:
                return seconds, "at most"
            part = (before[1] - target) / (before[1] - rate)
            low, high = math.log(before[0]), math.log(seconds)
            return math.exp(low + part * (high - low)), ""
        before = seconds, rate
    return None, "not reached"


def seconds_over_seeds(by_seed: Sequence[Sequence[Point]], target: float) -> dict[str, Any]:
    """`seconds_to` of each training seed: its range, the median with those that never reach it as the
    longest (None where it is one of these), and how many reach it."""
    found = [seconds_to(points, target) for points in by_seed]
    reached = sorted(seconds for seconds, _ in found if seconds is not None)
    ordered = [*reached, *([math.inf] * (len(found) - len(reached)))]
    middle = statistics.median_low(ordered) if ordered else math.inf
    return {
        "median": None if math.isinf(middle) else middle,
        "min": reached[0] if reached else None,
        "max": reached[-1] if reached and len(reached) == len(found) else None,
        "reached": len(reached),
        "seeds": len(found),
        "at_most": any(bound == "at most" for _, bound in found),
    }


def verdict(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Of two `spread`s of word error rates: "better" or "worse" of the first, "tie", or "one seed"."""
    if min(first["seeds"], second["seeds"]) < 2:
        return "one seed"
    noise = max(each["max"] - each["min"] for each in (first, second))
    difference = first["mean"] - second["mean"]
    if abs(difference) <= noise:
        return "tie"
    return "better" if difference < 0 else "worse"


def best_rate(runs: Sequence[Run]) -> float:
    """The learning rate with the lowest word error rate; among equal ones that with fewer wrong
    characters, then with the lower held-out loss."""
    best = min(runs, key=lambda run: (run["wer"]["value"], run["cer"], run["heldout_loss"]))
    return best["job"]["lr"]


def of_recipe(runs: Sequence[Run], sweep: Sequence[Run]) -> dict[str, Any]:
    """The figures of one recipe.

    Args:
        runs: at the best rate, of all budgets and training seeds.
        sweep: of one seed at the smallest budget, one per rate.
    """
    budgets = []
    for budget in {run["job"]["budget"] for run in runs}:
        here = [run for run in runs if run["job"]["budget"] == budget]
        figures = {
            "wer": [run["wer"]["value"] for run in here],
            "seconds": [run["seconds"] for run in here],
            "heldout_loss": [run["heldout_loss"] for run in here],
            "text_gain": [run["text_gain"] for run in here],
            "noise_seed_difference": [
                max(run["wer_by_noise_seed"]) - min(run["wer_by_noise_seed"]) for run in here
            ],
        }
        steps = {"budget": budget, "steps": here[0]["job"]["steps"]}
        budgets.append(steps | {name: spread(each) for name, each in figures.items()})
    budgets.sort(key=lambda each: each["steps"])
    seeds = sorted({run["job"]["seed"] for run in runs})
    by_seed = [
        [(run["seconds"], run["wer"]["value"]) for run in runs if run["job"]["seed"] == seed]
        for seed in seeds
    ]
    rates = sorted((run["job"]["lr"], run["wer"]["value"]) for run in sweep)
    lr = best_rate(sweep)
    return {
        "lr": lr,
        "sweep": [{"lr": rate, "wer": wer} for rate, wer in rates],
        "lr_at_edge_of_sweep": len(rates) > 1 and lr in (rates[0][0], rates[-1][0]),
        "seconds_per_step": statistics.median(run["seconds"] / run["job"]["steps"] for run in runs),
        "budgets": budgets,
        "seconds_to": {f"{target:g}": seconds_over_seeds(by_seed, target) for target in TARGETS},
        "cpu_fraction": min(run["cpu_fraction"] for run in runs),
    }


def against(recipes: Mapping[str, Any], base: str = "shipped") -> dict[str, list[dict[str, Any]]]:
    """Each other recipe beside the base at each budget that both have."""
    if base not in recipes:
        return {}
    own = {budget["budget"]: budget["wer"] for budget in recipes[base]["budgets"]}
    return {
        name: [
            {
                "budget": budget["budget"],
                "difference": budget["wer"]["mean"] - own[budget["budget"]]["mean"],
                "verdict": verdict(budget["wer"], own[budget["budget"]]),
            }
            for budget in recipe["budgets"]
            if budget["budget"] in own
        ]
        for name, recipe in recipes.items()
        if name != base
    }


def against_peers(recipes: Mapping[str, Any], peers: Sequence[str]) -> dict[str, Any]:
    """Seconds of the shipped recipe to the first target over those of the better peer; where no peer
    arrives, over the shortest of their longest runs, which is an upper bound of the ratio.

    Returns:
        "verdict": "reached" or "missed", of the aim; "not shown" where the bound does not tell, and
        without peers or the shipped recipe. "ratio" is None where the shipped recipe does not arrive.
    """
    target = f"{TARGETS[0]:g}"
    found = {name: recipes[name] for name in peers if name in recipes}
    if not found or "shipped" not in recipes:
        return {"ratio": None, "verdict": "not shown"}
    arrivals = {name: each["seconds_to"][target]["median"] for name, each in found.items()}
    arrivals = {name: seconds for name, seconds in arrivals.items() if seconds is not None}
    longest = {name: each["budgets"][-1]["seconds"]["mean"] for name, each in found.items()}
    peer, seconds = min((arrivals or longest).items(), key=lambda each: each[1])
    own = recipes["shipped"]["seconds_to"][target]["median"]
    ratio = None if own is None else own / seconds
    verdict = "missed"
    if ratio is not None and ratio <= AIM:
        verdict = "reached"
    elif not arrivals:
        verdict = "not shown"
    return {
        "peer": peer,
        "peer_arrives": bool(arrivals),
        "peer_seconds": seconds,
        "shipped_seconds": own,
        "ratio": ratio,
        "aim": AIM,
        "verdict": verdict,
    }


# ---- for people


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _with_range(figure: Mapping[str, Any]) -> str:
    mean, low, high = (percent(figure[name]) for name in ("mean", "min", "max"))
    return f"{mean} %" if figure["seeds"] == 1 else f"{mean} % ({low}-{high})"


def _seconds(found: Mapping[str, Any]) -> str:
    if not found["reached"]:
        return "not reached"
    seeds = f"; {found['reached']} of {found['seeds']} seeds"
    some = seeds if found["reached"] < found["seeds"] else ""
    low, high = (None if v is None else f"{v:.0f}" for v in (found["min"], found["max"]))
    sign = "≤ " if found["at_most"] else ""
    if found["median"] is None:
        return f"from {low}{some}"
    limits = f" ({low}-{high})" if found["seeds"] > 1 and high else some and f" (from {low}{some})"
    return f"{sign}{found['median']:.0f}{limits}"


def table(report: Mapping[str, Any]) -> str:
    """Markdown, one line per recipe."""
    recipes = report["recipes"]
    order = {b["budget"]: b["steps"] for each in recipes.values() for b in each["budgets"]}
    names = sorted(order, key=lambda name: order[name])
    words = [name if name.endswith("s") else f"{name} steps" for name in names]
    head = ["recipe", "rate", "s per step", *(f"WER at {each}" for each in words)]
    head += ["held-out loss", "text gain", "s to 10 %", "s to 2 %", "beside shipped"]
    lines = [head, ["---"] * len(head)]
    for name, each in recipes.items():
        by_name = {budget["budget"]: budget for budget in each["budgets"]}
        last = each["budgets"][-1]
        verdicts = report["against_shipped"].get(name, [])
        lines.append(
            [
                f"`{name}`",
                f"{each['lr']:g}{' (edge)' if each['lr_at_edge_of_sweep'] else ''}",
                f"{each['seconds_per_step']:.3f}",
                *(_with_range(by_name[n]["wer"]) if n in by_name else "-" for n in names),
                f"{last['heldout_loss']['mean']:.4f}",
                f"{last['text_gain']['mean']:+.3f}",
                *(_seconds(each["seconds_to"][f"{target:g}"]) for target in TARGETS),
                ", ".join(dict.fromkeys(v["verdict"] for v in verdicts[-1:])) or "-",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
