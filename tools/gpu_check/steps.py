"""Whole training steps: the trainer itself in benchmark mode in this process, timed and then profiled.

The host may run ahead of the device, as in training. All utterances have full length, and averages of the weights are off.
"""

import json
from functools import partial
from typing import Any
from unittest import mock

from torch.profiler import record_function

from tools.gpu_check.measuring import profiled
from tools.gpu_check.models import arguments
from tools.gpu_check.supervisor import ROOT, Item, Settings, Turn, Values

FLAVORS = {  # config, samples of a micro-batch, GiB of device memory at most
    "debug": ("debug", 2, 1.0),
    "800M": ("dit_tts_800m", 32, 60.0),
    "3B": ("dit_tts_3b", 8, 110.0),
    "8B": ("dit_tts_8b", 1, 130.0),
}
_FASTER = ("all compiled", "all options of Inductor", "own norm", "reduce-overhead", "fp8 rowwise")


def run(
    settings: Settings, flavor: str, said: str, lengths: str, keys: list[str], turn: Turn
) -> Values:
    """Figures of a run in benchmark mode, whose timed steps begin at the item's turn, and of a profile of the steps behind
    them. `lengths`: of [benchmark]; `keys`: further arguments."""
    from torchtitan.models.dit_tts import main, trainer

    profile: Values = {}
    steps, warm_up = (2, 1) if settings.tiny else (20, 4)
    steps *= 1 if lengths == "longest" else 3

    class Profiled(trainer.DiTTTSTrainer):
        """Waits for its turn behind the warm-up, and has its last steps profiled."""

        def train_step(self, data_iterator) -> None:
            benchmark: Any = self.benchmark
            timed = self.step - benchmark.warm_up_steps
            if timed == 1:
                turn()
            super().train_step(data_iterator)
            if timed < steps:
                return
            ours = self.forward_pass
            for part, owner, attribute in (
                ("noising", ours, "add_noise"),
                ("text encoder", ours.text_encoder, "forward"),
                ("speaker encoder", self.model_parts[0].speaker_encoder, "forward"),
                ("forward", ours, "loss_sum"),
                ("optimizer", self.optimizers, "step_unless"),
            ):
                if owner is not None:  # its kernels and host time stand under this name
                    setattr(owner, attribute, record_function(part)(getattr(owner, attribute)))

            def one_more() -> None:
                self.step += 1
                super(Profiled, self).train_step(data_iterator)

            # Marks are of timed steps, and the schedule has no steps beyond them.
            with (
                mock.patch.object(self, "benchmark", None),
                mock.patch.object(self.lr_schedulers, "step"),
            ):
                profile.update(profiled(one_more, settings.device, repeats=3))

    name = f"{flavor}_{said}".replace(" ", "_").replace(",", "")
    runs = settings.work / "runs"
    given = [f"--job.config_file={ROOT / 'train_configs' / FLAVORS[flavor][0]}.toml"]
    given += [f"--job.dump_folder={runs}", f"--job.experiment={name}", "--ema.no-enable"]
    given += ["--benchmark.enable", f"--benchmark.steps={steps}", f"--benchmark.lengths={lengths}"]
    given += [f"--benchmark.warmup_steps={warm_up}", "--metrics.log_freq=1000"]
    given += ["--metrics.no-enable-tensorboard", *keys]
    with mock.patch.object(trainer, "DiTTTSTrainer", Profiled):
        status = main.train(given)
    if status:
        raise RuntimeError(f"the run ended with status {status}; its log says why")
    report = json.loads((runs / name / "benchmark.json").read_text())
    values = {f"ms_{k}": report["seconds_per_step"][k] * 1e3 for k in ("median", "p10", "p90")}
    kept = ["samples_per_second", "peak_allocated_gib", "tflops_per_device", "mfu", "mfu_6n"]
    kept += ["goodput_tflops_per_device", "goodput_mfu", "compiles_while_timed", "step_split"]
    return values | {key: report[key] for key in kept} | profile


def sized(flavor: str, times: int = 1, accumulation: int = 1) -> list[str]:
    """Arguments for micro-batches of so many times the flavor's own size."""
    size = times * FLAVORS[flavor][1]
    whole = [
        f"--{k}={size * accumulation}"
        for k in ("training.global_batch_size", "data.batch_multiple")
    ]
    return [f"--training.local_batch_size={size}", *whole]


def items(settings: Settings) -> list[Item]:
    """Return the items of each flavor: the config's own step first, then what may be faster or is its counterpart."""
    listed = []
    for flavor in settings.flavors:
        own, plain = sized(flavor), "--activation_checkpoint.mode=none"
        cases = {
            "as shipped": own,
            "accumulation 4": sized(flavor, accumulation=4),
            **{name: [*own, *arguments(name)] for name in _FASTER},
            "twice the micro-batch": sized(flavor, times=2),
            "no checkpointing": [*own, plain],
            "eager": [*own, "--compile.no-enable", plain],
        }
        for said, keys in list(cases.items())[: 1 if settings.tiny else None]:
            measure = partial(run, settings, flavor, said, "longest", keys)
            listed.append(Item(f"{flavor} step, {said}", measure, FLAVORS[flavor][2]))
    return listed


def goodput(settings: Settings) -> list[Item]:
    """FLOPs of real lengths per second on mixed lengths: `goodput_tflops_per_device`."""
    flavor, listed = settings.flavors[0], []
    _, samples, gib = FLAVORS[flavor]
    packed = ["--data.batching=packed", f"--data.longest_per_row={min(4, samples)}"]
    for said, keys in {"packed rows": packed, "8 buckets": ["--data.num_buckets=8"]}.items():
        measure = partial(run, settings, flavor, said, "mixed", [*sized(flavor), *keys])
        listed.append(Item(f"{flavor} mixed lengths, {said}", measure, gib))
    return listed
