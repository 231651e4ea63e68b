"""Autotune with other processes in the place of training runs, of known memory and speed."""

import sys
import tomllib
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers.fixed_sets import write_rows
from titan_tts.grids import runner
from titan_tts.grids.autotune import Autotune
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import config_from_dict, load_config
from torchtitan.models.dit_tts.errors import InputError

# A run of n samples of f frames needs n·f, full checkpointing half of it at 0.9 of the speed; a run of all
# buckets needs 1 % more, and ten steps 3 % more than a trial's one.
RUN = """
import json, sys, time, tomllib
folder, limit = sys.argv[1], float(sys.argv[2])
config = tomllib.load(open(folder + "/config.toml", "rb"))
data, training, benchmark = config["data"], config["training"], config["benchmark"]
full = config["activation_checkpoint"]["mode"] == "full"
sizes = [size // 2 for size in data["bucket_batch_sizes"]] or [training["local_batch_size"]]
needed = max(n * f for n, f in zip(sizes, data["bucket_frames"] or [data["max_frames"]]))
needed *= (0.5 if full else 1) * (1.01 if len(sizes) > 1 else 1.03 if benchmark["steps"] > 1 else 1)
state = "completed" if needed <= limit else "oom"
if config["debug"].get("seed") in (9, 8 if full else 9): state = "failed"
speed = (0.9 if full else 1) * sizes[-1] / (5 + sizes[-1])
report = {"samples_per_second": speed, "mfu": None, "peak_reserved_gib": 1.0}
json.dump(report, open(folder + "/benchmark.json", "w"))
json.dump({"state": state, "time": time.time(), "error": "its words"}, open(folder + "/state.json", "w"))
"""

FRAMES = [16, 32, 64]


@pytest.fixture
def tune(tmp_path, monkeypatch):
    def made(limit: float, *arguments: str, **changes):
        def command(config, processes, nodes):
            return [sys.executable, "-c", RUN, str(Path(config).parent), str(limit)]

        monkeypatch.setattr(runner, "train_command", command)
        start = ["--job.config_file=train_configs/debug.toml", "--training.global_batch_size=800"]
        config = load_config([*start, *arguments])
        options = {"axes": {}, "buckets": FRAMES, "gpu": "", "memory_gib": 0.0}
        options = options | {"timeout_seconds": 60.0} | changes
        return Autotune(config, 2, tmp_path / "work", **options)

    return made


def test_every_bucket_has_its_largest_micro_batch(tune, monkeypatch):
    found = tune(64 * 20).run()
    assert found.alone == [
        76,
        38,
        19,
    ]  # 20 in a trial, but not in ten steps; as many frames of each
    assert found.micro_batches == [76, 38, 19]
    assert found.best.batch == 19 and found.best.samples_per_second == pytest.approx(19 / 24)
    # Another command takes the trials that are there.
    assert tune(64 * 20, buckets=[64]).run().micro_batches == [19]
    with monkeypatch.context() as context:
        context.delattr(runner.Runner, "run")
        assert tune(64 * 20).run() == found


def test_a_micro_batch_is_at_most_a_ranks_part_of_the_global_batch(tune, capsys):
    found = tune(64 * 200, "--training.global_batch_size=12").run()
    assert found.alone == found.micro_batches == [24, 12, 6]
    assert found.keys["data"]["bucket_batch_sizes"] == [48, 24, 12]
    said = capsys.readouterr().out
    assert "bucket of 64 frames: the first guess is 6, the limit 6\n" in said
    assert "bucket of 16 frames: the first guess is 24, the limit 24\n" in said


@pytest.mark.parametrize(
    "wanted, steps, micro", [(12, 1, 6), (38, 1, 19), (40, 2, 10), (200, 6, 17)]
)
def test_the_keys_are_a_config_of_about_the_same_global_batch(tune, wanted, steps, micro):
    arguments = [f"--training.global_batch_size={wanted}", "--data.batch_multiple=2"]
    found = tune(64 * 20, *arguments).run()
    keys = tomllib.loads(found.toml())
    assert keys == found.keys and found.accumulation == steps
    training, data = keys["training"], keys["data"]
    assert (training["local_batch_size"], training["global_batch_size"]) == (
        micro,
        micro * 2 * steps,
    )
    assert wanted <= training["global_batch_size"] < wanted + 2 * steps
    # As many frames as in the longest bucket, as far as they fit.
    blocks = 2 * steps
    assert data["bucket_batch_sizes"] == [
        micro * 4 * blocks,
        micro * 2 * blocks,
        micro * blocks,
    ]
    validate_config(config_from_dict(keys | {"job": {"experiment": "x"}}, "found"), 2, ["debug"])


def test_the_largest_batches_where_they_are_wanted(tune):
    found = tune(64 * 20, largest=True).run()
    assert found.alone == [80, 40, 19]
    assert found.micro_batches == [75, 38, 18]  # all in one run need 1 % more
    assert found.keys["data"]["bucket_batch_sizes"] == [75 * 46, 38 * 46, 18 * 46]


def test_the_result_can_be_tuned_again(tune):
    sizes = ["--data.bucket_frames=16,32,64", "--data.bucket_batch_sizes=48,24,12"]
    assert tune(64 * 20, *sizes, buckets=[]).run().micro_batches == [76, 38, 19]


def test_trials_of_another_model_are_not_taken(tune):
    tune(64 * 20).run()
    with pytest.raises(InputError, match="was run with other settings"):
        tune(64 * 20, "--encoder.n_layers=3").run()


def test_two_commands_do_not_share_a_folder(tune):
    one, other = tune(64 * 20), tune(64 * 20)
    with FileLock(one.cells.folder / ".lock"), pytest.raises(InputError, match="another command"):
        other.run()


def test_the_fastest_choice_is_tuned(tune):
    axes = {"layout": ["ddp", "fsdp"], "checkpointing": ["none", "full"]}
    few = tune(64 * 4.2, axes=axes).run()
    # Half of the memory is worth more than a tenth of the speed at small batches.
    assert few.best.axes == {"layout": "ddp", "checkpointing": "full"} and few.best.batch == 8
    assert few.keys["activation_checkpoint"]["mode"] == "full"
    assert few.keys["parallelism"]["data_parallel_replicate_degree"] == 2
    assert len(few.choices) == 4 and "# layout ddp, checkpointing full: micro-batch 8" in few.toml()


@pytest.mark.parametrize("checkpointing", ["every 3", "op", "memory_budget 0.3"])
def test_the_keys_train_as_was_measured(tune, checkpointing):
    compiled = "--compile.enable"  # which a memory budget needs
    tuned = tune(64 * 8, compiled, axes={"checkpointing": [checkpointing]}, buckets=[64])
    found = tuned.run()
    measured = tuned._cell(found.best.axes, 64, 1, {"benchmark.steps": 1}).config
    suggested = config_from_dict(found.keys, "found")
    assert suggested.activation_checkpoint == measured.activation_checkpoint


def test_more_memory_is_no_gain_where_batches_are_large(tune):
    many = tune(64 * 200.0, axes={"checkpointing": ["none", "full"]}).run()
    assert many.best.axes == {"checkpointing": "none"}


def test_choices_that_are_refused_or_fail_do_not_end_it(tune):
    axes = {"layout": ["hsdp", "ddp"], "checkpointing": ["full", "none"]}
    found = tune(64 * 8, "--debug.seed=8", axes=axes, buckets=[64]).run()
    assert found.best.axes == {"layout": "ddp", "checkpointing": "none"} and found.alone == [7]
    assert [choice.batch for choice in found.choices] == [0, 0, 0, 7]
    assert tomllib.loads(found.toml()) == found.keys
    for words in (
        "# layout hsdp, checkpointing none: 2 GPUs have no layout hsdp\n",
        "# layout ddp, checkpointing full: the trial of batch 8 ended with failed: its words",
    ):
        assert words in found.toml()


def test_buckets_of_data_are_those_of_the_loader(tune, tmp_path):
    write_rows(tmp_path / "a0", [("", None, frames, 8) for frames in (8, 100)])
    write_rows(tmp_path / "a1", [("", None, frames, 8) for frames in (16, 64)])

    def edges(path: str, *arguments: str) -> list[int]:
        options = ["--data.latent_channels=4", "--data.num_buckets=2", "--data.on_too_long=drop"]
        options.append("--data.path=" + ",".join(f"{tmp_path}/{each}" for each in path.split(",")))
        return tune(1e5, *options, *arguments, buckets=[])._edges()

    assert edges("a*/*.tar") == edges("a{0..1}") == [16, 64]
    assert edges("a0") == [8]  # the longer one is dropped
    assert edges("a0,a1", "--data.weights=100,1") == [8, 64]


def test_buckets_are_those_of_the_config_or_of_the_benchmark(tune, capsys):
    given = tune(1e5, "--data.bucket_frames=24,64", buckets=[])
    assert given._edges() == [24, 64] and "as given" in capsys.readouterr().out
    missing = tune(1e5, "--data.path=/nowhere", buckets=[])
    edges = missing._edges()
    assert len(edges) == 4 and edges[-1] == 64
    assert "since [data] path '/nowhere' names no .tar file" in capsys.readouterr().out


@pytest.mark.parametrize(
    "limit, changes, words",
    [
        (10, {}, "not even one sample of 64 frames fits"),
        (1e5, {"axes": {"layout": ["hsdp"]}}, "2 GPUs have no layout hsdp"),
        (1e5, {"buckets": [16, 65]}, r"lengths from 1 to \[data\] max_frames = 64"),
        (1e5, {"buckets": [16, 16, 64]}, "8 different lengths"),
        (1e5, {"buckets": list(range(8, 17))}, "up to 8"),
        (
            1e5,
            {"arguments": ["--debug.seed=9"]},
            "the trial of batch 8 ended with failed: its words",
        ),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(tune, limit, changes, words):
    arguments = changes.pop("arguments", [])
    with pytest.raises(InputError, match=words):
        tune(limit, *arguments, **changes).run()
