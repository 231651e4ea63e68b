"""The learning rate schedule: every optimizer follows it, and a checkpoint has its position alone."""

from dataclasses import replace

import pytest
from torchtitan.config import LRScheduler

from tests.helpers.small_models import initialized_model, small_args
from torchtitan.models.dit_tts.config.job_config import Optimizer
from torchtitan.models.dit_tts.infra.optimizer import (
    TTSOptimizers,
    build_tts_lr_schedulers,
    build_tts_optimizers,
)

CONFIG = Optimizer(lr=1e-2, weight_decay=0.1)


def build(**changes) -> TTSOptimizers:
    model = initialized_model(small_args(text_vocab_size=20))
    return build_tts_optimizers([model], replace(CONFIG, **changes), None)


def test_the_schedule_reaches_every_optimizer_and_survives_other_groups():
    optimizers = build(name="Muon", muon_lr=0.5)
    schedulers = build_tts_lr_schedulers(optimizers, LRScheduler(warmup_steps=4), 10)
    optimizers.step()
    schedulers.step()
    adam, muon = optimizers.optimizers
    assert [group["lr"] for group in adam.param_groups] == pytest.approx([1e-2 * 2 / 4] * 2)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.5 * 2 / 4)
    # Into a run with other optimizers and learning rates: the position counts.
    other = build(state_dtype="8bit", lr=3.0)
    loaded = build_tts_lr_schedulers(other, LRScheduler(warmup_steps=4), 10)
    loaded.load_state_dict(schedulers.state_dict())
    groups = [group for adam in other.optimizers for group in adam.param_groups]
    assert [float(group["lr"]) for group in groups] == [1.5] * 3


def test_a_longer_run_continues_from_the_stable_part(caplog):
    def rates(
        steps: int, first: int = 0, saved: dict | None = None, decay_ratio: float | None = 0.2
    ) -> list[float]:
        optimizers = build(lr=1.0)
        schedule = LRScheduler(warmup_steps=4, decay_ratio=decay_ratio, decay_type="sqrt")
        schedulers = build_tts_lr_schedulers(optimizers, schedule, steps)
        schedulers.load_state_dict(saved or schedulers.state_dict())
        found = []
        for _ in range(first, steps):
            found.append(schedulers.schedulers[0].get_last_lr()[0])
            schedulers.step()
        return found

    assert rates(20, decay_ratio=1.0) == rates(20, decay_ratio=None)
    # All behind the warm-up, of which upstream would warn.
    assert not caplog.messages and rates(20, decay_ratio=0.9) and "exceed" in caplog.text
    short, long = rates(20), rates(40)
    assert short[:17] == [0.25, 0.5, 0.75, 1.0] + [1.0] * 13
    # The last step, not a step after it, ends above 0.
    assert short[17:] == pytest.approx([1 - (n / 4) ** 0.5 for n in (1, 2, 3)])
    assert long[:33] == short[:4] + [1.0] * 29 and long[33] < 1.0
    assert rates(40, 12, {"last_epoch": 12}) == long[12:]
