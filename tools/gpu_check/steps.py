"""Whole training steps: the trainer itself in benchmark mode in this process, timed and then profiled.

The host may run ahead of the device, as in training; afterwards some steps are profiled: sums by group of kernels, by part
of the step (forward with text encoder, speaker encoder and noising in it, backward, optimizer), the time that the device
idles and that the host takes. All utterances have full length, and averages of the weights are off.
"""

import json
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.gpu_check.items import ROOT, Item, Settings, Turn, Values
from tools.gpu_check.measuring import profiled
from tools.gpu_check.models import INDUCTOR_OPTIONS, TRITON_NORM

_CONFIGS = {name: f"dit_tts_{name.lower()}.toml" for name in ("800M", "3B", "8B")}
_CONFIGS["debug"] = "debug.toml"
_MICRO_BATCH = {"debug": 2, "800M": 32, "3B": 8, "8B": 1}
_GIB = {"debug": 1.0, "800M": 60.0, "3B": 110.0, "8B": 130.0}
_PROFILED = 3
_EAGER = ["--compile.no-enable", "--activation_checkpoint.mode=none"]
_FP8 = ["--model.converters=float8", "--quantize.linear.float8.recipe_name=rowwise"]


def run(
    settings: Settings, flavor: str, said: str, lengths: str, arguments: list[str], turn: Turn
) -> Values:
    """A run in benchmark mode, whose timed steps begin at the item's turn.

    Args:
        lengths: of [benchmark].

    Returns:
        figures of its benchmark.json, and of a profile of `_PROFILED` steps behind the timed ones.
    """
    from torchtitan.models.dit_tts import main, trainer

    profile: Values = {}
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
                    mock.patch.object(self, "benchmark", None),
                    mock.patch.object(self.lr_schedulers, "step"),
                ):
                    profile.update(profiled(one_more, settings.device, _PROFILED))

        def named_parts(self) -> None:
            parts: dict[str, tuple[Any, str]] = {"noising": (self.forward_pass, "add_noise")}
            if self.forward_pass.text_encoder is not None:
                parts["text encoder"] = (self.forward_pass.text_encoder, "forward")
            parts["speaker encoder"] = (self.model_parts[0].speaker_encoder, "forward")
            parts["forward"] = (self.forward_pass, "loss_sum")
            parts["optimizer"] = (self.optimizers, "step_unless")
            for part, (owner, attribute) in parts.items():
                setattr(owner, attribute, _named(part, getattr(owner, attribute)))

    name = f"{flavor}_{said}".replace(" ", "_").replace(",", "")
    runs = Path(settings.work, "runs")
    given = [f"--job.config_file={ROOT / 'train_configs' / _CONFIGS[flavor]}"]
    given += [f"--job.dump_folder={runs}", f"--job.experiment={name}", "--ema.no-enable"]
    given += ["--benchmark.enable", f"--benchmark.steps={steps}", f"--benchmark.lengths={lengths}"]
    given += [f"--benchmark.warmup_steps={warm_up}", "--metrics.log_freq=1000"]
    given += ["--metrics.no-enable-tensorboard", *arguments]
    with mock.patch.object(trainer, "DiTTTSTrainer", Profiled):
        status = main.train(given)
    if status:
        raise RuntimeError(f"the run ended with status {status}; its log says why")
    report = json.loads((runs / name / "benchmark.json").read_text())
    values = {f"ms_{k}": report["seconds_per_step"][k] * 1e3 for k in ("median", "p10", "p90")}
    kept = ("samples_per_second", "peak_allocated_gib", "tflops_per_device", "mfu", "mfu_6n")
    values |= {key: report[key] for key in (*kept, "goodput_tflops_per_device", "goodput_mfu")}
    return values | {k: report[k] for k in ("compiles_while_timed", "step_split")} | profile


def _named(part: str, called: Callable[..., Any]) -> Callable[..., Any]:
    """The callable, whose kernels and host time stand under a name in a profile."""

    def inside(*positional: Any, **named: Any) -> Any:
        with torch.profiler.record_function(part):
            return called(*positional, **named)

    return inside


def sized(flavor: str, times: int = 1, accumulation: int = 1) -> list[str]:
    """Arguments for micro-batches of so many times the flavor's own size."""
    size = times * _MICRO_BATCH[flavor]
    whole = f"--training.global_batch_size={size * accumulation}"
    multiple = f"--data.batch_multiple={size * accumulation}"
    return [f"--training.local_batch_size={size}", whole, multiple]


def step(
    settings: Settings,
    flavor: str,
    said: str,
    lengths: str,
    arguments: list[str],
    options: dict[str, Any],
    turn: Turn,
) -> Values:
    with torch._inductor.config.patch(options):
        return run(settings, flavor, said, lengths, arguments, turn)


def items(settings: Settings) -> list[Item]:
    """Return the items of each flavor: the config's own step first, then what may be faster or is its counterpart."""
    listed = []
    for flavor in settings.flavors:
        config = tomllib.loads((ROOT / "train_configs" / _CONFIGS[flavor]).read_text())
        compiles = config.get("compile", {}).get("enable", False)
        own, other = sized(flavor), _EAGER if compiles else ["--compile.enable"]
        cases: dict[str, tuple[list[str], dict[str, Any]]] = {
            "as shipped": (own, {}),
            "accumulation 4": (sized(flavor, accumulation=4), {}),
            "all options of Inductor": (own, INDUCTOR_OPTIONS),
            "own norm": ([*own, *TRITON_NORM], {}),
            "twice the micro-batch": (sized(flavor, times=2), {}),
            "no checkpointing": ([*own, "--activation_checkpoint.mode=none"], {}),
            "fp8 rowwise": ([*own, *_FP8], {}),
            "eager" if compiles else "compiled": ([*own, *other], {}),
        }
        for said, given in list(cases.items())[: 1 if settings.tiny else None]:
            measure = partial(step, settings, flavor, said, "longest", *given)
            listed.append(Item("step", f"{flavor} step, {said}", measure, _GIB[flavor]))
    return listed


def goodput_items(settings: Settings) -> list[Item]:
    """FLOPs of real lengths per second on mixed lengths: `goodput_tflops_per_device`."""
    flavor, listed = settings.flavors[0], []
    packed = f"--data.longest_per_row={min(4, _MICRO_BATCH[flavor])}"
    ways = {
        "packed rows": ["--data.batching=packed", packed],
        "8 buckets": ["--data.num_buckets=8"],
    }
    for said, keys in ways.items():
        measure = partial(run, settings, flavor, said, "mixed", [*sized(flavor), *keys])
        listed.append(Item("goodput", f"{flavor} mixed lengths, {said}", measure, _GIB[flavor]))
    return listed
