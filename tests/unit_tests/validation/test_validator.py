"""Validation within runs: its rows, whatever ends them, the checkpoint it keeps, and that it disturbs
nothing."""

import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.small_models import assert_equal
from tests.helpers.tiny_runs import Folder, break_weights, killed
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.validation.heldout_loss import HeldoutLoss
from torchtitan.models.dit_tts.validation.validator import Validator, _undisturbed

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def heldout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("heldout") / "heldout"
    make_shards(folder, 11, 5, channels=8, frames=lambda generator: int(generator.integers(8, 33)))
    return folder


@pytest.fixture
def options(heldout) -> list[str]:
    return [
        f"--validation.path={heldout}",
        "--validation.freq=3",
        "--validation.samples=9",
        "--validation.batch_size=4",
        "--validation.times=0.9,0.3",
    ]


def measured(folder: Folder) -> list[dict]:
    """Without what a clock says."""
    return [
        {name: value for name, value in row.items() if name not in ("time", "seconds")}
        for row in folder.validation()
    ]


def test_rows_at_their_steps_and_at_the_last(tmp_path, train, options, caplog, monkeypatch):
    caplog.set_level("INFO")
    excluded, exclude_time = [], TTSMetricsProcessor.exclude_time
    noted = lambda metrics, seconds: (excluded.append(seconds), exclude_time(metrics, seconds))  # noqa: E731
    monkeypatch.setattr(TTSMetricsProcessor, "exclude_time", noted)
    arguments = [*options, "--training.steps=8", "--ema.decays=0.9,0.05", "--metrics.log_freq=5"]
    assert train("run", *arguments) == 0
    run = Folder(tmp_path / "run")
    found = run.validation()
    assert [row["step"] for row in found] == [3, 6, 8]
    assert all(row["samples"] == 9 and row["weights"] == "ema:0.9" for row in found)
    for row in found:
        by_weights = [row[f"heldout_loss_{name}"] for name in ("raw", "ema:0.05", "ema:0.9")]
        assert row["heldout_loss"] == by_weights[-1] and len(set(by_weights)) == 3
        assert math.isfinite(row["text_gain"]) and math.isfinite(row["speaker_gain"])
    # Throughput leaves it out.
    assert sum(excluded) >= sum(row["seconds"] for row in found) > 0
    assert caplog.text.count("validation at step ") == 3
    assert "Only 9 held-out" not in caplog.text  # nine were asked for
    # What is validated is logged.
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6, 8]  # 2, 4: saved


def test_few_held_out_samples_and_those_that_are_trained_on_are_named(
    tmp_path, train, options, tiny_data, caplog, monkeypatch
):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    few = make_shards(tmp_path / "few", 9, 6, channels=8, frames=lambda _: 20)
    count = len(open_dataset(str(tiny_data), 8))
    for path, sentence in (
        (few, "Only 9 held-out samples: "),
        (tiny_data, f"{count} of the {count} held-out samples are also training samples"),
    ):
        caplog.clear()
        given = f"--validation.path={path}", "--validation.samples=64", "--training.steps=1"
        more = "--checkpoint.no-enable", "--training.mixed_precision_param=bfloat16"
        assert train("run", *options, *given, *more) == 0
        assert "bfloat16 is many times slower than float32 on this CPU" in caplog.text
        assert caplog.text.count("held-out samples") == caplog.text.count(sentence) == 1
        assert "Nothing will be saved: [checkpoint] enable = false" in caplog.text
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    "more",
    [
        ["--checkpoint.async_mode=async", "--ema.decays=0.9,0.5"],
        ["--ema.no-enable", "--data.conditioning=speaker", "--data.conditioning_dropout=0.5"],
    ],
    ids=["async", "conditions"],
)
def test_training_is_the_same_without_it(tmp_path, train, options, more, caplog):
    assert train("with", *options, "--training.steps=5", *more) == 0
    off = "--validation.no-enable"
    assert "No validation: " not in caplog.text
    assert train("without", *options, off, "--training.steps=5", *more) == 0
    assert "No validation: " in caplog.text
    run, expected = Folder(tmp_path / "with"), Folder(tmp_path / "without")
    assert len(run.validation()) == 2 and not (expected.path / "validation.jsonl").exists()
    assert run.losses() == expected.losses() and len(run.losses()) == 5
    norms = [[row["grad_norm"] for row in each.metrics()] for each in (run, expected)]
    assert norms[0] == norms[1]
    assert_equal(run.tensors(5), expected.tensors(5))


@pytest.mark.parametrize("at", [4, 8])
def test_a_kill_within_a_validation_leaves_no_row_out(tmp_path, train, options, monkeypatch, at):
    """Its step is saved before it, so the next start begins behind it, or has nothing left to train."""
    arguments = [*options, "--validation.freq=4", "--training.steps=8"]
    assert train("unbroken", *arguments) == 0
    with monkeypatch.context() as patch:
        measure = HeldoutLoss.measure

        def dies(loss, gains):
            if len(calls) == at // 2 - 1:  # of two for each validation: the second, of the average
                killed()
            calls.append(gains)
            return measure(loss, gains)

        calls: list[bool] = []
        patch.setattr(HeldoutLoss, "measure", dies)
        with pytest.raises(RuntimeError, match="killed"):
            train("killed", *arguments)
    run, expected = Folder(tmp_path / "killed"), Folder(tmp_path / "unbroken")
    assert f"step-{at}" in run.checkpoints()
    for _ in range(2):  # once more, and nothing is due
        assert train("killed", *arguments) == 0
        assert measured(run) == measured(expected) and len(measured(run)) == 2
    assert_equal(run.tensors(8), expected.tensors(8))


def test_undone_steps_are_validated_once(
    tmp_path, train, options, bad_batches, skip_from_the_start
):
    """Bad steps right after a validation, and at one."""
    bad_batches.update({3: math.nan, 6: math.nan})
    arguments = [*options, "--training.steps=6", "--metrics.log_freq=100"]
    assert train("run", *arguments) == 0
    bad_batches.clear()
    skip_from_the_start([3, 6])
    assert train("expected", *arguments) == 0
    run, expected = Folder(tmp_path / "run"), Folder(tmp_path / "expected")
    assert [row["step"] for row in run.validation()] == [3, 6]
    assert measured(run) == measured(expected)


def test_rows_after_a_rollback_are_measured_anew(tmp_path, train, options, after_step):
    steps = {
        6: lambda trainer: (break_weights(trainer), steps.clear())
    }  # its row is measured with broken weights, hence null
    after_step(steps)
    arguments = [*options, "--training.steps=9", "--checkpoint.interval=5"]
    # Or the average, which is not broken yet, has the best loss, and the broken weights are kept with it.
    assert train("run", *arguments, "--validation.keep_best=heldout_loss_raw") == 0
    run = Folder(tmp_path / "run")
    assert [row["step"] for row in run.validation()] == [3, 6, 9]
    assert all(math.isfinite(row["heldout_loss_raw"]) for row in run.validation())
    text = (run.path / "validation.jsonl").read_text() + (run.path / "metrics.jsonl").read_text()
    assert "NaN" not in text


@pytest.fixture
def planned(monkeypatch):
    """Sets what validations measure, by step, in the place of the best held-out loss."""
    record, values = Validator._record, {}

    def planted(validator, row, step, *rest):
        record(validator, row | {"best_heldout_loss": values[step]}, step, *rest)

    monkeypatch.setattr(Validator, "_record", planted)
    return values


KEEP = ["--checkpoint.interval=4", "--checkpoint.keep_latest_k=2", "--validation.freq=1"]


def test_the_best_steps_checkpoint_outlives_the_others(tmp_path, train, options, planned):
    """Whether it was a regular save or not; the best before it goes at once, if it was none. Beside it as
    many of the others are kept as ever."""
    run = Folder(tmp_path / "run")
    planned.update({1: 9.0, 2: 5.0, 3: 6.0, 4: 6.0, 5: 7.0, 6: 7.0, 7: 7.0, 8: 5.0})
    assert train("run", *options, *KEEP, "--training.steps=8") == 0
    assert run.checkpoints() == {"step-2", "step-4", "step-8"}
    # A resume knows it: later saves leave it, until a better one comes, which is no regular save.
    for stop, new, kept in (
        (13, {}, {"step-2", "step-12", "step-13"}),
        (14, {14: 1.0}, {"step-12", "step-13", "step-14"}),
        (16, {16: 0.5}, {"step-13", "step-16"}),  # a regular save, which stays when others come
        (24, {}, {"step-16", "step-20", "step-24"}),
        (29, {28: 0.4, 29: 0.3}, {"step-24", "step-28", "step-29"}),  # and when a better one comes
    ):
        planned.update(dict.fromkeys(range(max(planned) + 1, stop + 1), 6.0) | new)
        assert train("run", *options, *KEEP, f"--training.steps={stop}") == 0
        assert kept <= run.checkpoints() and len(run.checkpoints()) == 3


def test_the_model_is_left_as_it_was():
    """Also by an error; and nothing is compiled for the shapes of validation."""

    class Block(torch.nn.Linear):  # torch's own layers alone are not compiled
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    model, compiled = Block(2, 2), []
    model.args = SimpleNamespace(attention="varlen")
    model.compile(backend=lambda graph, inputs: compiled.append(graph) or graph)
    for error in (None, KeyError):
        with nullcontext() if error is None else pytest.raises(error):
            with _undisturbed(model):
                assert not model.training and model.args.attention == "sdpa"
                model(torch.ones(1, 2))
                if error is not None:
                    raise error
        assert model.training and model.args.attention == "varlen" and not compiled
    model(torch.ones(1, 2))
    assert len(compiled) == 1
