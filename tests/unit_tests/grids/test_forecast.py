"""What the plan predicts of a grid's runs."""

from dataclasses import replace

import pytest

from titan_tts.grids import grid_run as module
from titan_tts.grids.cells import Cells
from titan_tts.grids.grid_file import GridFile, Options
from titan_tts.grids.grid_run import Forecaster

SMALL = {
    "data.max_frames": 64,
    "data.num_buckets": 2,
    "encoder.n_layers": 1,
    "training.mixed_precision_param": "bfloat16",
    "training.global_batch_size": 16,
    "compile.components": ["model"],
}


@pytest.fixture
def cells(tmp_path):
    def made(settings: dict, **options) -> Cells:
        return Cells(GridFile(Options(config="debug", **options), SMALL | settings), tmp_path)

    return made


def test_a_run_of_mixed_lengths_fits_where_every_bucket_does(cells):
    """Short utterances with long references need more than long ones."""
    buckets = {"data.bucket_frames": [32, 64]}
    buckets["data.max_reference_ratio"] = 0.0
    forecaster = Forecaster("H200")

    def forecast(lengths: str):
        return forecaster.forecast(cells(buckets, lengths=lengths).make({}, 0))

    longest, mixed = forecast("longest"), forecast("mixed")
    assert longest["fits"] and mixed["fits"] and mixed["gib"] > longest["gib"] > 0.05
    room = (longest["gib"] + mixed["gib"]) / 2 + 1.5
    forecaster.device = replace(forecaster.device, memory_gib=room / 0.96)
    assert forecast("longest")["fits"] and not forecast("mixed")["fits"]


def test_cells_of_one_model_build_it_once(cells, monkeypatch):
    """Layout, batch, checkpointing and optimizer are not the model's; limits of the data may be."""
    built = []

    class Planner(module.Planner):
        def __init__(self, config, cluster, model=None):
            built.append(model is None)
            super().__init__(config, cluster, model)

    monkeypatch.setattr(module, "Planner", Planner)
    forecaster, made = Forecaster("H200"), cells({}, gpus_per_node=4)
    several = [
        {"layout": "fsdp", "checkpointing": "every 2", "gpus": 4, "batch": 1},
        {"layout": "fsdp", "gpus": 8, "batch": 6},
        {"layout": "ddp", "gpus": 4, "batch": 1, "optimizer.state_dtype": "8bit"},
    ]
    found = [forecaster.forecast(made.make(each, 0)) for each in several]
    assert all(each["fits"] and each["gpu"] == "H200" for each in found)
    assert len({each["gib"] for each in found}) == 3 and built == [True, False, False]
    assert forecaster.forecast(made.make({"batch": 2, "encoder.n_layers": 3}, 0)) and built[-1]
    forecaster.device = replace(forecaster.device, memory_gib=3.0)
    largest = forecaster.largest(made.make({"batch": "auto"}, 0))
    for batch, fits in ((largest, True), (largest + 1, False)):
        assert forecaster.forecast(made.make({"batch": batch}, 0))["fits"] == fits
    assert forecaster.forecast(made.make({"precision": "fp32"}, 0)) is None


def test_a_forecast_that_fails_does_not_end_the_grid(cells, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no plan")

    monkeypatch.setattr(module, "Planner", fails)
    cell, forecaster = cells({}).make({"batch": 4}, 0), Forecaster("H200")
    assert (forecaster.forecast(cell), forecaster.largest(cell)) == (None, 0)
    assert f"{cell.name}: no forecast (RuntimeError: no plan)" in caplog.text
