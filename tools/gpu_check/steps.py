"""Whole training steps: the trainer itself in benchmark mode in this process, timed and then profiled.

The host may run ahead of the device, as in training; afterwards some steps are profiled: sums by group of kernels, by part
of the step (forward with text encoder, speaker encoder and noising in it, backward, optimizer), the time that the device
idles and that the host takes. All utterances have full length, and averages of the weights are off.
"""

import gc
import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tools.gpu_check.items import Item, Turn, Values
from tools.gpu_check.measuring import profiled
from tools.gpu_check.models import INDUCTOR_OPTIONS
from tools.gpu_check.settings import ROOT, Settings

_CONFIGS = {name: f"dit_tts_{name.lower()}.toml" for name in ("800M", "3B", "8B")}
_CONFIGS["debug"] = "debug.toml"
_MICRO_BATCH = {"debug": 2, "800M": 32, "3B": 8, "8B": 1}
_GIB = {"debug": 1.0, "800M": 60.0, "3B": 110.0, "8B": 130.0}
_PROFILED = 3
_EAGER = ["--compile.no-enable", "--activation_checkpoint.mode=none"]
_FP8 = ["--model.converters=float8", "--quantize.linear.float8.recipe_name=rowwise"]


@contextmanager
def _patched(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def run(
    settings: Settings, flavor: str, name: str, lengths: str, arguments: list[str], turn: Turn
) -> Values:
    """A run in benchmark mode, whose timed steps begin at the item's turn.

    Args:
        lengths: of [benchmark].

    Returns:
        `report`, its benchmark.json, and `profile` of `_PROFILED` steps behind the timed ones.
    """
    from torchtitan.models.dit_tts import main, trainer

    found: Values = {}
    steps, warm_up = (2, 1) if settings.tiny else (20, 4)
    steps *= 1 if lengths == "longest" else 3

    class Profiled(trainer.DiTTTSTrainer):
        """Waits for its turn behind the warm-up, and has its last steps profiled."""

        def train_step(self, data_iterator) -> None:
            if self.step == self.benchmark.warm_up_steps + 1:
                turn()
            super().train_step(data_iterator)
            if self.step == self.benchmark.warm_up_steps + steps:
                self.named_parts()

                def one_more() -> None:
                    self.step += 1
                    super(Profiled, self).train_step(data_iterator)

                # Marks are of timed steps, and the schedule has no steps beyond them.
                with (
                    _patched(self, benchmark=None),
                    _patched(self.lr_schedulers, step=lambda: None),
                ):
                    found["profile"] = profiled(one_more, settings.device, _PROFILED)

        def named_parts(self) -> None:
            parts: dict[str, tuple[Any, str]] = {"noising": (self.forward_pass, "add_noise")}
            if self.forward_pass.text_encoder is not None:
                parts["text encoder"] = (self.forward_pass.text_encoder, "forward")
            parts["speaker encoder"] = (self.model_parts[0].speaker_encoder, "forward")
            parts["forward"] = (self.forward_pass, "loss_sum")
            parts["optimizer"] = (self.optimizers, "step_unless")
            for part, (owner, attribute) in parts.items():
                setattr(owner, attribute, _named(part, getattr(owner, attribute)))

    runs = settings.folder / "runs"
    shutil.rmtree(runs / name, ignore_errors=True)
    given = [f"--job.config_file={ROOT / 'train_configs' / _CONFIGS[flavor]}"]
    given += [f"--job.dump_folder={runs}", f"--job.experiment={name}", "--ema.no-enable"]
    given += ["--benchmark.enable", f"--benchmark.steps={steps}", f"--benchmark.lengths={lengths}"]
    given += [f"--benchmark.warmup_steps={warm_up}", "--metrics.log_freq=1000"]
    given += ["--metrics.no-enable-tensorboard", *arguments]
    with _patched(trainer, DiTTTSTrainer=Profiled):
        status = main.train(given)
    if status:
        raise RuntimeError(f"the run ended with status {status}; its log says why")
    gc.collect()
    return {**found, "report": json.loads((runs / name / "benchmark.json").read_text())}


def _named(part: str, called: Callable[..., Any]) -> Callable[..., Any]:
    """The callable, whose kernels and host time stand under a name in a profile."""

    def inside(*positional: Any, **named: Any) -> Any:
        with torch.profiler.record_function(part):
            return called(*positional, **named)

    return inside


def figures(found: Values) -> Values:
    """What stands in the table of a benchmark's report; MFU by each convention."""
    report = found["report"]
    seconds = report["seconds_per_step"]
    values: Values = {f"ms_{k}": seconds[k] * 1e3 for k in ("median", "p10", "p90")}
    values |= {key: report[key] for key in ("samples_per_second", "peak_allocated_gib")}
    values["tflops"] = report["tflops_per_device"]
    for row in report["conventions"]:
        if row["mfu"] is not None:
            values[f"mfu, {row['convention']}"] = row["mfu"]
    values |= {key: report[key] for key in ("compiles_while_timed", "step_split")}
    values |= {key: v for key, v in found["profile"].items() if key != "kernels"}
    return values | {"kernels": found["profile"]["kernels"]}


def sized(settings: Settings, flavor: str, micro_batch: int, accumulation: int = 1) -> list[str]:
    size = settings.micro_batch or micro_batch or _MICRO_BATCH[flavor]
    whole = f"--training.global_batch_size={size * accumulation}"
    multiple = f"--data.batch_multiple={size * accumulation}"
    return [f"--training.local_batch_size={size}", whole, multiple]


def step(
    settings: Settings,
    flavor: str,
    said: str,
    arguments: list[str],
    options: tuple[str, ...],
    turn: Turn,
) -> Values:
    from torch._inductor import config

    name = f"{flavor}_{said}".replace(" ", "_").replace(",", "")
    with config.patch({option: INDUCTOR_OPTIONS[option] for option in options}):
        return figures(run(settings, flavor, name, "longest", arguments, turn))


def items(settings: Settings) -> list[Item]:
    """For each flavor the config's own step first, then what may be faster or is its counterpart."""
    listed = []
    for flavor in settings.flavors:
        config = tomllib.loads((ROOT / "train_configs" / _CONFIGS[flavor]).read_text())
        compiles = config.get("compile", {}).get("enable", False)
        other = ("eager", _EAGER) if compiles else ("compiled", ["--compile.enable"])
        every = tuple(INDUCTOR_OPTIONS)
        cases: list[tuple[str, list[str], int, int, tuple[str, ...]]] = [
            ("as shipped", [], 0, 1, ())
        ]
        if not settings.tiny:
            cases += [
                ("accumulation 4", [], 0, 4, ()),
                ("all options of Inductor", [], 0, 1, every),
                ("twice the micro-batch", [], 2 * _MICRO_BATCH[flavor], 1, ()),
                ("no checkpointing", ["--activation_checkpoint.mode=none"], 0, 1, ()),
                ("fp8 rowwise", _FP8, 0, 1, ()),
                (*other, 0, 1, ()),
            ]
        for said, arguments, size, accumulation, options in cases:
            given = [*sized(settings, flavor, size, accumulation), *arguments]
            measure = partial(step, settings, flavor, said, given, options)
            listed.append(Item("step", f"{flavor} step, {said}", measure, _GIB[flavor]))
    return listed


def goodput(settings: Settings, flavor: str, batching: str, turn: Turn) -> Values:
    """FLOPs of real lengths per second on mixed lengths."""
    keys = ["--data.num_buckets=8"]
    if batching == "packed rows":
        rows = min(4, settings.micro_batch or _MICRO_BATCH[flavor])
        keys = ["--data.batching=packed", f"--data.longest_per_row={rows}"]
    name = f"{flavor}_{batching}".replace(" ", "_")
    found = run(settings, flavor, name, "mixed", [*sized(settings, flavor, 0), *keys], turn)
    [useful] = [r for r in found["report"]["conventions"] if r["convention"] == "exact goodput"]
    return {"goodput_tflops": useful["tflops_per_device"], **figures(found)}


def goodput_items(settings: Settings) -> list[Item]:
    flavor = settings.flavors[0]
    return [
        Item(
            "goodput",
            f"{flavor} mixed lengths, {how}",
            partial(goodput, settings, flavor, how),
            _GIB[flavor],
        )
        for how in ("packed rows", "8 buckets")
    ]
