"""Stage: whole training steps in benchmark mode, at growing and shrinking micro-batches.

One run of the trainer each, all utterances of full length, without EMA. The micro-batches come in the
order of what they tell: the trainer's own first. One above a micro-batch that did not fit is left out.
Memory stands beside what `titan-tts plan` says, which is asked on the CPU meanwhile. Beside the first
micro-batch stands the same in the other way of running the blocks: eager where the config compiles, without
its memory budget, which needs compile; compiled where it does not.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_check.items import Item, NotMeasured, Values
from tools.gpu_check.settings import ROOT, Settings
from tools.gpu_check.train_runs import OutOfMemoryError, benchmark, config_of, sizes

_MICRO_BATCHES = {
    "debug": (1, 2),
    "800M": (32, 64, 8, 96, 1, 2, 4, 16),
    "3B": (8, 4, 16, 1, 2),
    "8B": (1, 2, 4),
}
_LEAST_SECONDS = {"debug": 3.0, "800M": 35.0, "3B": 60.0, "8B": 90.0}
"""start, compile and a dozen steps"""

_PLAN_SECONDS = 30.0
"""that a plan is waited for at most, after its run and within the stage's time"""


class Plans:
    """What `titan-tts plan` predicts of a run, asked on the CPU while the run is on the device."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.asked: dict[tuple[str, int], subprocess.Popen] = {}

    def ask(self, flavor: str, micro_batch: int) -> None:
        if not self.settings.gpu or (flavor, micro_batch) in self.asked:
            return
        code = "import sys, titan_tts; sys.argv[0] = 'titan-tts'; titan_tts.main()"
        command = [sys.executable, "-c", code, "plan", config_of(flavor), "--json"]
        command += ["--gpu", self.settings.gpu, "--gpus-per-node=1", *sizes(micro_batch)]
        # One thread, and no GPU: the run beside it is timed.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(self._file(flavor, micro_batch, "json"), "wb") as output:
            with open(self._file(flavor, micro_batch, "log"), "wb") as log:
                self.asked[flavor, micro_batch] = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=output, stderr=log
                )

    def of(self, flavor: str, micro_batch: int) -> Values:
        """Its figures, or why there are none."""
        process = self.asked.get((flavor, micro_batch))
        if process is None:
            return {"plan": "none: titan-tts plan does not know this GPU"}
        seconds = min(_PLAN_SECONDS, max(0.0, self.settings.deadline - time.time()))
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"plan": f"none: not ready {seconds:.0f} s after the run"}
        if status:
            said = self._file(flavor, micro_batch, "log").read_text(errors="replace").splitlines()
            return {"plan": f"none: {said[-1][:300] if said else f'status {status}'}"}
        return planned(json.loads(self._file(flavor, micro_batch, "json").read_text()))

    def _file(self, flavor: str, micro_batch: int, kind: str) -> Path:
        return self.settings.folder / f"plan_{flavor}_{micro_batch}.{kind}"


def planned(plan: dict[str, Any]) -> Values:
    """Peak memory and seconds of a step of full-length micro-batches."""
    step = plan["longest"]
    return {
        "plan": f"for {plan['cluster']['device']['name']}",
        "planned_gib": step["memory"]["total"] / 2**30,
        "planned_seconds": step["seconds"]["estimate"],
        "predicted": {
            "device": plan["cluster"]["device"]["name"],
            "factor": plan["factor"]["value"],
            "seconds_per_step": step["seconds"]["estimate"],
        },
    }


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
    plans: Plans,
    settings: Settings,
) -> Values:
    # By arguments too: what is too large with fp8 may fit without.
    kind = (flavor, *arguments)
    limit = too_large.get(kind)
    if limit is not None and micro_batch >= limit:
        raise NotMeasured(f"a micro-batch of {limit} did not fit already")
    plans.ask(flavor, micro_batch)
    try:
        report = benchmark(settings, flavor, micro_batch, "longest", arguments)
    except OutOfMemoryError:
        too_large[kind] = micro_batch
        raise
    values = {**figures(report), **({} if arguments else plans.of(flavor, micro_batch))}
    if "planned_gib" in values and settings.device != "cpu":
        # The plan is of what is allocated; the allocator reserves more.
        values["measured_to_planned"] = values["peak_allocated_gib"] / values["planned_gib"]
        if "predicted" in values:
            measured = {"seconds_per_step": values["seconds_per_step"]}
            values["calibration"] = {"predicted": values["predicted"], "measured": measured}
    values.pop("predicted", None)
    return values


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
        **{said: given for said, given in checkpointing.items() if said != own},
        ", fp8 rowwise": fp8,
        ", encoders eager": ["--compile.components", "model"],
    }


def items(settings: Settings) -> list[Item]:
    plans, too_large = Plans(settings), {}
    listed: list[tuple[int, Item]] = []
    for flavor in settings.flavors:
        micro_batches = settings.micro_batches or _MICRO_BATCHES[flavor]
        runs = [(place, each, "", []) for place, each in enumerate(micro_batches)]
        runs.append((0, micro_batches[0], *_other_way(flavor)))
        if not settings.tiny:
            runs += [(1, micro_batches[0], *other) for other in _others(flavor).items()]
        for place, micro_batch, said, arguments in runs:
            measure = partial(step, flavor, micro_batch, arguments, too_large, plans, settings)
            name = f"{flavor} step, micro-batch {micro_batch}{said}"
            listed.append((place, Item(name, measure, _LEAST_SECONDS[flavor])))
    # Every size's most telling run before any size's second.
    return [item for _, item in sorted(listed, key=lambda entry: entry[0])]
