"""What the plan predicts of a grid's runs."""

from dataclasses import replace

from tests.helpers.plan_cases import SMALL, shipped_debug_config
from titan_tts.grids import forecast as module
from titan_tts.grids.cells import Cells
from titan_tts.grids.forecast import Forecaster
from titan_tts.grids.grid_file import GridFile, Options


def test_a_run_of_mixed_lengths_fits_where_every_bucket_does(tmp_path):
    """Short utterances with long references need more than long ones."""
    arguments = ["--data.bucket_frames=32,64", "--data.bucket_batch_sizes=64,16"]
    arguments += ["--data.max_reference_ratio=0", "--training.global_batch_size=16"]
    base = shipped_debug_config(*SMALL, *arguments)
    forecaster = Forecaster("H200")

    def forecast(lengths: str):
        grid = GridFile(Options(config="base", lengths=lengths))
        return forecaster.forecast(Cells(grid, tmp_path, base).make({}, 0))

    longest, mixed = forecast("longest"), forecast("mixed")
    assert longest["fits"] and mixed["fits"] and mixed["gib"] > longest["gib"] > 0.05
    room = (longest["gib"] + mixed["gib"]) / 2 + 1.5
    forecaster.device = replace(forecaster.device, memory_gib=room / 0.96)
    assert forecast("longest")["fits"] and not forecast("mixed")["fits"]


def test_cells_of_one_model_build_it_once(tmp_path, monkeypatch):
    """Layout, batch, checkpointing and optimizer are not the model's; limits of the data may be."""
    built = []

    class Planner(module.Planner):
        def __init__(self, config, cluster, model=None):
            built.append(model is None)
            super().__init__(config, cluster, model)

    monkeypatch.setattr(module, "Planner", Planner)
    forecaster = Forecaster("H200")
    base = shipped_debug_config(*SMALL, "--training.global_batch_size=16")
    cells = Cells(GridFile(Options(config="base", gpus_per_node=4)), tmp_path, base)
    several = [
        {"layout": "fsdp", "checkpointing": "every 2", "gpus": 4, "batch": 1},
        {"layout": "fsdp", "gpus": 8, "batch": 6},
        {"layout": "ddp", "gpus": 4, "batch": 1, "optimizer.state_dtype": "8bit"},
    ]
    found = [forecaster.forecast(cells.make(each, 0)) for each in several]
    assert all(each["fits"] and each["gpu"] == "H200" for each in found)
    assert len({each["gib"] for each in found}) == 3 and built == [True, False, False]
    assert forecaster.forecast(cells.make({"batch": 2, "encoder.n_layers": 3}, 0)) and built[-1]
    forecaster.device = replace(forecaster.device, memory_gib=3.0)
    largest = forecaster.largest(cells.make({"batch": "auto"}, 0))
    for batch, fits in ((largest, True), (largest + 1, False)):
        assert forecaster.forecast(cells.make({"batch": batch}, 0))["fits"] == fits
    assert forecaster.forecast(cells.make({"precision": "fp32"}, 0)) is None


def test_a_forecast_that_fails_does_not_end_the_grid(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no plan")

    monkeypatch.setattr(module, "Planner", fails)
    base = shipped_debug_config(*SMALL, "--training.global_batch_size=16")
    cell = Cells(GridFile(Options(config="base")), tmp_path, base).make({"batch": 4}, 0)
    forecaster = Forecaster("H200")
    assert (forecaster.forecast(cell), forecaster.largest(cell)) == (None, 0)
    assert f"{cell.name}: no forecast (RuntimeError: no plan)" in caplog.text
