"""Stage: a run that is killed and resumed gives the losses of one that was not.

The debug flavor in float32 with deterministic kernels, on a few random samples. After the kill the run
starts anew from its last checkpoint. The bar, 1e-5 of the loss, is for the same numbers by the same
kernels: what differs is that the resumed process may choose another algorithm for a product.
"""

from functools import partial
from pathlib import Path

from tools.gpu_check import train_runs
from tools.gpu_check.items import Item, Values
from tools.gpu_check.settings import Settings

_STEPS = 8
_KILLED_AFTER = 5
_BAR = 1e-5


def arguments(data: Path) -> list[str]:
    return [
        "--data.path",
        str(data),
        "--data.num_buckets=2",
        "--data.max_dropped_fraction=1",
        "--data.batch_multiple=8",
        "--training.local_batch_size=8",
        "--training.global_batch_size=8",
        "--training.mixed_precision_param=float32",
        f"--training.steps={_STEPS}",
        "--checkpoint.interval=2",
        "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1",
        "--metrics.no-enable-tensorboard",
        "--debug.seed=7",
        "--debug.deterministic",
        "--debug.deterministic_warn_only",
    ]


def killed_and_resumed(settings: Settings) -> Values:
    # Imported here: this stage otherwise only starts processes.
    from tools.harness.synthetic import make_shards

    data = settings.folder / "resume_data"
    make_shards(data, 32, seed=5)
    given = arguments(data)
    runs = settings.folder / "runs"
    unbroken = train_runs.losses(train_runs.finished(settings, "debug", "unbroken", given))

    def far_enough() -> bool:
        return max(train_runs.losses(runs / "killed"), default=0) >= _KILLED_AFTER

    first = train_runs.start(settings, "debug", "killed", given)
    train_runs.wait(settings, first, until=far_enough)
    if not far_enough():
        raise RuntimeError(
            f"the run ended with status {first.process.returncode} before step {_KILLED_AFTER}"
        )
    killed_at = max(train_runs.losses(runs / "killed"))
    resumed = train_runs.losses(train_runs.finished(settings, "debug", "killed", given))
    if sorted(resumed) != sorted(unbroken) or max(resumed) != _STEPS:
        return {"passed": False, "why": f"steps {sorted(resumed)} instead of {sorted(unbroken)}"}
    worst = max(abs(resumed[step] - unbroken[step]) / unbroken[step] for step in unbroken)
    return {
        "loss_difference": worst,
        "bar": _BAR,
        "killed_at_step": killed_at,
        "steps": _STEPS,
        "passed": worst <= _BAR,
        "why": "the resumed run's losses are others",
    }


def items(settings: Settings) -> list[Item]:
    return [Item("killed and resumed", partial(killed_and_resumed, settings), 5.0)]
