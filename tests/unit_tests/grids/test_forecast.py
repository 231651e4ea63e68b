"""What the plan predicts of a grid's runs."""

from dataclasses import replace
from itertools import product

import pytest
from titan_tts.plan.activations import ActivationMemory, KindMemory

from tests.helpers.plan_cases import SMALL, shipped_debug_config
from titan_tts.grids.cells import Cells
from titan_tts.grids.forecast import Forecaster
from titan_tts.grids.grid_file import GridFile, Options
from titan_tts.plan import memory
from titan_tts.plan.memory import Activations

GIB = 2**30


@pytest.mark.usefixtures("remembered_passes")
def test_a_run_of_mixed_lengths_fits_where_every_bucket_does(tmp_path, monkeypatch):
    """Short utterances with long references need more than long ones."""

    def memory(self, config, sharded, samples, lengths):
        return ActivationMemory(0, samples * (100 + lengths.frames) * 2**20, 0)

    monkeypatch.setattr(Activations, "memory", memory)
    arguments = ["--data.bucket_frames=32,64", "--data.bucket_batch_sizes=32,16"]
    arguments += ["--data.max_reference_ratio=0", "--training.global_batch_size=16"]
    base = shipped_debug_config(*SMALL, *arguments)
    forecaster = Forecaster("H200")

    def forecast(lengths: str):
        grid = GridFile(Options(config="base", lengths=lengths))
        return forecaster.forecast(Cells(grid, tmp_path, base).make({}, 0))

    longest, mixed = forecast("longest"), forecast("mixed")
    assert longest["fits"] and mixed["fits"] and mixed["gib"] > longest["gib"] + 1
    room = (longest["gib"] + mixed["gib"]) / 2 + 1.5
    forecaster.device = replace(forecaster.device, memory_gib=room / 0.96)
    assert forecast("longest")["fits"] and not forecast("mixed")["fits"]


def test_cells_share_what_does_not_depend_on_their_layout(tmp_path, monkeypatch):
    """One pass per way of sharding, checkpointing and number of samples, for any GPUs, optimizer, attention."""
    passes = []

    def kind_memory(config, args, samples, lengths, kind, sharded, encoders):
        passes.append((samples, kind, sharded))
        return KindMemory(0, 0, samples * 2**20, 0, [])

    monkeypatch.setattr(memory, "kind_memory", kind_memory)
    forecaster = Forecaster("H200")
    base = shipped_debug_config(*SMALL, "--training.global_batch_size=16")
    cells = Cells(GridFile(Options(config="base", gpus_per_node=4)), tmp_path, base)
    sharded = {"layout": "fsdp", "checkpointing": "every 2"}
    others = ({}, {"attention": "flex"}, {"optimizer.state_dtype": "bfloat16"})
    for gpus, more, batch in product((4, 8), others, (1, 6)):
        cell = cells.make(sharded | more | {"gpus": gpus, "batch": batch}, 0)
        assert forecaster.forecast(cell)["fits"]
    assert sorted(passes) == [(n, kind, True) for n in (2, 3) for kind in ("full", "none")]
    ddp = {"gpus": 4, "layout": "ddp", "batch": 1}
    assert forecaster.forecast(cells.make(ddp, 0))
    assert sorted(passes[4:]) == [(2, "none", False), (3, "none", False)]
    assert forecaster.forecast(cells.make(ddp | {"data.max_frames": 48}, 0)) and len(passes) == 8
