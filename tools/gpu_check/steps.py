"""Stage: whole training steps in benchmark mode, at growing and shrinking micro-batches.

One run of the trainer each, all utterances of full length, without EMA. The micro-batches come in the
order of what they tell: the trainer's own first. One above a micro-batch that did not fit is left out.
Beside the first micro-batch stands the same in the other way of running the blocks: eager where the config
compiles, without its memory budget, which needs compile; compiled where it does not.
"""

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_check.items import Item, NotMeasured, Values
from tools.gpu_check.settings import Settings
from tools.gpu_check.train_runs import OutOfMemoryError, benchmark, config_of

_MICRO_BATCHES = {
    "debug": (1, 2),
    "800M": (32, 64, 8, 96, 1, 2, 4, 16),
    "3B": (8, 4, 16, 1, 2),
    "8B": (1, 2, 4),
}
_LEAST_SECONDS = {"debug": 3.0, "800M": 45.0, "3B": 60.0, "8B": 90.0}
"""start, compile and a dozen steps"""


def figures(report: dict[str, Any]) -> Values:
    """What stands in the table of a benchmark's report; MFU by each convention."""
    seconds = report["seconds_per_step"]
    values: Values = {
        "seconds_per_step": seconds["median"],
        "p10_seconds": seconds["p10"],
        "p90_seconds": seconds["p90"],
        "samples_per_second": report["samples_per_second"],
        "audio_seconds_per_second": report["audio_seconds_per_second"],
        "tflops": report["tflops_per_device"],
        "peak_allocated_gib": report["peak_allocated_gib"],
        "peak_reserved_gib": report["peak_reserved_gib"],
        "padding_fraction": report["padding_fraction"],
        "text_padding_fraction": report["text_padding_fraction"],
        "reference_padding_fraction": report["reference_padding_fraction"],
        "compiles_while_timed": report["compiles_while_timed"],
        "step_split": report["step_split"],
    }
    if report["hfu"] is not None:
        values["hfu"] = report["hfu"]
    for row in report["conventions"]:
        if row["mfu"] is not None:
            values[f"mfu, {row['convention']}"] = row["mfu"]
    return {**values, "text_encoder": report["text_encoder"], "run": slim(report)}


def slim(report: dict[str, Any]) -> dict[str, Any]:
    """The report without what the check's own file says once."""
    kept = {key: value for key, value in report.items() if key != "step_seconds"}
    return {**kept, "environment": {"device": report["environment"]["device"]}}


def step(
    flavor: str,
    micro_batch: int,
    arguments: list[str],
    too_large: dict[tuple[str, ...], int],
    settings: Settings,
) -> Values:
    # By arguments too: what is too large with fp8 may fit without.
    kind = (flavor, *arguments)
    limit = too_large.get(kind)
    if limit is not None and micro_batch >= limit:
        raise NotMeasured(f"a micro-batch of {limit} did not fit already")
    try:
        return figures(benchmark(settings, flavor, micro_batch, "longest", arguments))
    except OutOfMemoryError:
        too_large[kind] = micro_batch
        raise


def _config(flavor: str) -> dict[str, Any]:
    return tomllib.loads(Path(config_of(flavor)).read_text())


def _other_way(flavor: str) -> tuple[str, list[str]]:
    """Eager beside the config's compiled blocks or the reverse: what it is called, and its arguments."""
    if _config(flavor).get("compile", {}).get("enable", False):
        return ", eager", ["--compile.no-enable", "--activation_checkpoint.mode=none"]
    return ", compiled", ["--compile.enable"]


def _others(flavor: str) -> dict[str, list[str]]:
    """Arguments of further runs that stand beside the config's own, by what they are called."""
    checkpointing = {
        ", no checkpointing": ["--activation_checkpoint.mode=none"],
        ", memory budget 0.9": [
            "--activation_checkpoint.mode=memory_budget",
            "--activation_checkpoint.memory_budget=0.9",
        ],
    }
    budget = _config(flavor).get("activation_checkpoint", {}).get("mode") == "memory_budget"
    own = ", memory budget 0.9" if budget else ", no checkpointing"
    fp8 = ["--model.converters=float8", "--quantize.linear.float8.recipe_name=rowwise"]
    return {
        ", fp8 rowwise": fp8,
        **{said: given for said, given in checkpointing.items() if said != own},
    }


def items(settings: Settings) -> list[Item]:
    too_large: dict[tuple[str, ...], int] = {}
    listed: list[tuple[int, Item]] = []
    for flavor in settings.flavors:
        micro_batches = settings.micro_batches or _MICRO_BATCHES[flavor]
        runs = [(place, each, "", []) for place, each in enumerate(micro_batches)]
        if not settings.tiny:
            runs += [(1, micro_batches[0], *other) for other in _others(flavor).items()]
        runs.append((1, micro_batches[0], *_other_way(flavor)))
        for place, micro_batch, said, arguments in runs:
            measure = partial(step, flavor, micro_batch, arguments, too_large, settings)
            name = f"{flavor} step, micro-batch {micro_batch}{said}"
            listed.append((place, Item(name, measure, _LEAST_SECONDS[flavor])))
    # Every size's most telling run before any size's second.
    return [item for _, item in sorted(listed, key=lambda entry: entry[0])]
