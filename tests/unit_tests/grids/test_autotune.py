"""Autotune over runs of known memory and speed."""

import re
import tomllib
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers.fixed_sets import write_rows
from tests.helpers.instant_runs import InstantRun, write_report
from titan_tts.cli import main
from titan_tts.grids import runner
from titan_tts.grids.autotune import Autotune
from titan_tts.grids.autotune_command import Options
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import config_from_dict, load_config
from torchtitan.models.dit_tts.errors import InputError

FRAMES = [16, 32, 64]


def train(config, folder, limit):
    """n samples of f frames need n·f, full checkpointing half of it at 0.9 of the speed; a run of all
    buckets needs 5 % more, and ten steps 3 % more than a trial's one."""
    data, training = config["data"], config["training"]
    full = config["activation_checkpoint"]["mode"] == "full"
    sizes = [size // 2 for size in data["bucket_batch_sizes"]] or [training["local_batch_size"]]
    frames = data["bucket_frames"] or [data["max_frames"]]
    needed = max(n * f for n, f in zip(sizes, frames)) * (0.5 if full else 1)
    needed *= 1.05 if len(sizes) > 1 else 1.03 if config["benchmark"]["steps"] > 1 else 1
    write_report(folder, (0.9 if full else 1) * sizes[-1] / (5 + sizes[-1]))
    if config["debug"].get("seed") in (9, 8 if full else 9):
        return "failed", "its words"
    return ("completed", "") if needed <= limit else ("oom", "no memory")


@pytest.fixture
def tune(tmp_path, monkeypatch):
    def made(limit: float, *arguments: str, **changes):
        def run(command, folder, log, memory_gib):
            return InstantRun(partial(train, limit=limit), folder)

        monkeypatch.setattr(runner, "RunProcess", run)
        start = ["--job.config_file=train_configs/debug.toml", "--training.global_batch_size=800"]
        options = Options("debug", nproc=2, timeout_minutes=1, **{"buckets": FRAMES, **changes})
        return Autotune(load_config([*start, *arguments]), options, tmp_path / "work")

    return made


def test_options_are_checked_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for given, words in (
        (["--timeout-minutes", "0"], "--timeout-minutes = 0.0, but it must be from 0.1"),
        (["--work", "/proc/x"], "--work = /proc/x/trials cannot be written"),
    ):
        assert main(["autotune", "debug", *given]) == 2 and words in capsys.readouterr().err
    Path("mine.toml").touch()
    assert main(["autotune", "mine.toml", "--out", "./mine.toml"]) == 2
    assert "--out = mine.toml is the config" in capsys.readouterr().err


@pytest.mark.long
def test_every_bucket_has_its_largest_micro_batch(tune, monkeypatch):
    found = tune(64 * 20).run()
    # 20 in a trial, but not in ten steps; as many frames of each.
    assert found.alone == found.micro_batches == [76, 38, 19]
    assert found.best.batch == 19 and found.best.samples_per_second == pytest.approx(19 / 24)
    # Another command takes the trials that are there, unless they are of another model.
    with monkeypatch.context() as context:
        context.delattr(runner.Runner, "run")
        assert tune(64 * 20).run() == found
    with pytest.raises(InputError, match="or to other settings"):
        tune(64 * 20, "--encoder.n_layers=3").run()


@pytest.mark.long
def test_a_micro_batch_is_at_most_a_ranks_part_of_the_global_batch(tune, capsys):
    sizes = ["--data.bucket_frames=16,32,64", "--data.bucket_batch_sizes=48,24,12"]
    found = tune(64 * 200, "--training.global_batch_size=12", *sizes, buckets=[]).run()
    assert found.alone == found.micro_batches == [24, 12, 6]
    assert found.keys["data"]["bucket_batch_sizes"] == [48, 24, 12]
    said = capsys.readouterr().out
    assert "bucket of 64 frames: the first guess is 6, the limit 6\n" in said
    assert "bucket of 16 frames: the first guess is 24, the limit 24\n" in said


@pytest.mark.long
@pytest.mark.parametrize("wanted, steps, micro", [(38, 1, 19), (200, 6, 17)])
def test_the_keys_are_a_config_of_about_the_same_global_batch(tune, wanted, steps, micro):
    arguments = [f"--training.global_batch_size={wanted}", "--data.batch_multiple=2"]
    found = tune(64 * 20, *arguments).run()
    keys = tomllib.loads(found.toml())
    assert keys == found.keys and found.accumulation == steps
    assert found.toml().startswith(f"# 2 ranks, accumulation steps: {steps}\n# largest micro-")
    blocks = 2 * steps
    training = {"local_batch_size": micro, "global_batch_size": micro * blocks}
    assert keys["training"] == training and wanted <= micro * blocks < wanted + blocks
    # As many frames as in the longest bucket, as far as they fit.
    sizes = [micro * each * blocks for each in (4, 2, 1)]
    assert keys["data"]["bucket_batch_sizes"] == sizes
    validate_config(config_from_dict(keys | {"job": {"experiment": "x"}}, "found"), 2, ["debug"])


@pytest.mark.long
def test_buckets_that_fit_one_by_one_are_tried_together(tune):
    found = tune(64 * 20.8).run()
    assert found.alone == [80, 40, 20]
    assert found.micro_batches == [75, 38, 19]  # all in one run need 5 % more
    assert found.keys["data"]["bucket_batch_sizes"] == [75 * 44, 38 * 44, 19 * 44]


def test_two_commands_do_not_share_a_folder(tune):
    one, other = tune(64 * 20), tune(64 * 20)
    with FileLock(one.cells.folder / ".lock"), pytest.raises(InputError, match="another command"):
        other.run()


@pytest.mark.long
def test_the_fastest_choice_is_tuned(tune):
    choices = {"layouts": ["ddp", "fsdp"], "checkpointing": ["none", "full"]}
    few = tune(64 * 4.2, buckets=[64], **choices).run()
    # Half of the memory is worth more than a tenth of the speed at small batches.
    assert few.best.axes == {"layout": "ddp", "checkpointing": "full"} and few.best.batch == 8
    assert few.keys["activation_checkpoint"]["mode"] == "full"
    assert few.keys["parallelism"]["data_parallel_replicate_degree"] == 2
    speeds = [float(each) for each in re.findall(r", ([\d.]+) samples/s", few.toml())]
    assert len(speeds) == 4 and speeds == sorted(speeds, reverse=True)
    assert len(few.choices) == 4 and "# layout ddp, checkpointing full: micro-batch 8" in few.toml()


def test_the_keys_train_as_was_measured(tune):
    choice = ["memory_budget 0.3"]
    tuned = tune(64 * 8, "--compile.enable", checkpointing=choice, buckets=[64])
    found = tuned.run()
    measured = tuned._cell(found.best.axes, 64, 1, {"benchmark.steps": 1}).config
    suggested = config_from_dict(found.keys, "found")
    assert suggested.activation_checkpoint == measured.activation_checkpoint


@pytest.mark.long
def test_choices_that_are_refused_or_fail_do_not_end_it(tune):
    choices = {"layouts": ["hsdp", "ddp"], "checkpointing": ["full", "none"]}
    found = tune(64 * 8, "--debug.seed=8", buckets=[64], **choices).run()
    assert found.best.axes == {"layout": "ddp", "checkpointing": "none"} and found.alone == [7]
    assert [choice.batch for choice in found.choices] == [0, 0, 0, 7]
    assert tomllib.loads(found.toml()) == found.keys
    for words in (
        "# layout hsdp, checkpointing none: 2 GPUs have no layout hsdp\n",
        "# layout ddp, checkpointing full: the trial of batch 8 ended with failed: its words",
    ):
        assert words in found.toml()


def test_defaults():
    options = Options("debug")
    assert (options.nproc, str(options.out), options.timeout_minutes) == (1, "autotune.toml", 20)
    assert options.memory_gib == 0


def test_edges_of_buckets(tune, tmp_path):
    """As given, or as the loader would choose them."""
    write_rows(tmp_path / "a0", [("", None, frames, 8) for frames in (8, 100)])
    write_rows(tmp_path / "a1", [("", None, frames, 8) for frames in (16, 64)])

    def edges(path: str, *arguments: str) -> list[int]:
        options = ["--data.latent_channels=4", "--data.num_buckets=2", "--data.on_too_long=drop"]
        options.append("--data.path=" + ",".join(f"{tmp_path}/{each}" for each in path.split(",")))
        return tune(1e5, *options, *arguments, buckets=[])._edges()

    assert edges("a*/*.tar") == edges("a{0..1}") == [16, 64]
    assert edges("a0") == [8]  # the longer one is dropped
    assert edges("a0,a1", "--data.weights=100,1") == [8, 64]
    with pytest.raises(InputError, match="path '/nowhere' matches no .tar file"):
        tune(1e5, "--data.path=/nowhere", buckets=[])._edges()


@pytest.mark.parametrize(
    "limit, changes, words",
    [
        (10, {}, "not even one sample of 64 frames fits"),
        (1e5, {"layouts": ["hsdp"]}, "2 GPUs have no layout hsdp"),
        (1e5, {"buckets": [16, 65]}, r"lengths from 1 to \[data\] max_frames = 64"),
        (1e5, {"buckets": [16, 16, 64]}, "8 different lengths"),
        (1e5, {"buckets": list(range(8, 17))}, "up to 8"),
        (1e5, {"arguments": ["--debug.seed=9"]}, "trial of batch 8 ended with failed: its words"),
    ],
)
def test_mistakes_are_one_sentence(tune, limit, changes, words):
    arguments = changes.pop("arguments", [])
    with pytest.raises(InputError, match=words):
        tune(limit, *arguments, **changes).run()
