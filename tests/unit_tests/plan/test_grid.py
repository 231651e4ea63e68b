"""titan-tts plan --grid: every choice is ranked, shown as too large, or refused with training's words."""

from dataclasses import replace

import pytest

from tests.helpers.plan_cases import H200, debug_config
from torchtitan.models.dit_tts.plan import grid as grid_module
from torchtitan.models.dit_tts.plan.devices import Cluster
from torchtitan.models.dit_tts.plan.grid import grid
from torchtitan.models.dit_tts.plan.report import grid_lines
from torchtitan.models.dit_tts.plan.step_time import GUESS

pytestmark = pytest.mark.usefixtures("remembered_passes")

SHORT = ["--data.bucket_frames=32,64", "--benchmark.mean_seconds=1.0"]


@pytest.fixture(autouse=True)
def fewer_choices(monkeypatch):
    """Each kind of checkpointing costs seconds."""
    monkeypatch.setattr(grid_module, "_CHECKPOINTING", (("none", "op"), ("full", "op")))


@pytest.mark.slow
def test_the_grid_drops_nothing():
    own = [
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=4",
    ]
    batch = ["--training.global_batch_size=16", "--data.batch_multiple=8"]
    config = debug_config(*own, *batch, *SHORT, "--training.local_batch_size=8")
    cluster = Cluster(replace(H200, memory_gib=1.68), 1, 1)
    choices = grid(config, cluster, GUESS)
    assert len(choices) == 3 * 2 * 5  # checkpointing x compile x 1, 2, 4, 8, 16
    refused = [choice for choice in choices if choice.refused]
    # 16 accumulation steps do not divide the batch multiple of 8: training would say so.
    assert {choice.accumulation for choice in refused} == {16} and len(refused) == 3 * 2
    assert choices[-6:] == refused and "batch_multiple = 8 cannot be divided" in refused[0].refused
    fits = [choice.fits for choice in choices]
    assert any(fits) and not all(fits[:-6])
    assert fits == sorted(fits, reverse=True)
    speeds = [choice.step.samples_per_second.middle for choice in choices if choice.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert all(choice.micro_batch * choice.accumulation == 16 for choice in choices)
    # Short buckets have more samples, each with its reference.
    assert all(
        c.max_bytes > c.step.memory.total for c in choices if c.step and c.checkpointing == "full"
    )
    [mine] = [choice for choice in choices if choice.own]
    assert (mine.checkpointing, mine.compiled, mine.micro_batch) == ("every 4", False, 8)
    printed = grid_lines(choices, cluster, GUESS)
    assert (
        sum("* one GPU" in line for line in printed) == 1
        and sum("refused: " in line for line in printed) == 6
    )


def test_without_a_global_batch_every_choice_has_the_same(monkeypatch):
    found = []

    def choice(planner, config, *_, **__):
        found.append((config.training.local_batch_size, config.training.global_batch_size))

    monkeypatch.setattr(grid_module, "_choice", choice)
    monkeypatch.setattr(grid_module, "_rank", lambda choice: 0)
    batch = ["--training.global_batch_size=-1", "--training.local_batch_size=4"]
    grid(debug_config(*batch), Cluster(H200, 2, 1), GUESS)
    assert set(found) == {(1, 8), (2, 8), (4, 8)}


@pytest.mark.long
def test_what_cannot_fit_is_shown():
    batch = ["--training.global_batch_size=16", "--data.batch_multiple=16"]
    config = debug_config("--model.flavor=800M", *batch)
    cluster = Cluster(replace(H200, memory_gib=1.6), 8, 2)
    choices = grid(config, cluster, GUESS)
    assert {choice.layout.name for choice in choices} == {"DDP", "FSDP2", "HSDP"}
    assert len(choices) == 3 * 2 * 2 and not any(choice.fits for choice in choices)
    printed = "\n".join(grid_lines(choices, cluster, GUESS))
    assert printed.count("states alone") == len(choices)
