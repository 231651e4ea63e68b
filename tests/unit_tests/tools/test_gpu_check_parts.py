"""Parts of the GPU check that start no stage: how runs are waited for, and what is timed."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.small_models import small_args
from titan_tts.launch.supervisor import RunProcess
from tools.gpu_check import block, ceilings, sampling, steps, train_runs
from tools.gpu_check.items import NotMeasured, is_out_of_memory
from tools.gpu_check.models import INDUCTOR_OPTIONS, Mode, built, random_weights
from tools.gpu_check.settings import Settings

TINY = small_args(dim=64, n_layers=1, mlp_dim=96, speaker_n_heads=1)


def settings(folder: Path, seconds: float = 60.0) -> Settings:
    return Settings("cpu", True, str(folder), ("debug",), (), time.time() + seconds)


def run_that(monkeypatch, state: str, then: str) -> list[RunProcess]:
    """Puts a process in a training run's place, which leaves a state and continues."""
    started: list[RunProcess] = []

    def start(settings, flavor, name, arguments):
        folder = settings.folder / "runs" / name
        folder.mkdir(parents=True)
        code = (
            "import json, sys, time; state = {'state': sys.argv[2], 'time': time.time(), 'error': 'its words'};"
            f"open(sys.argv[1], 'w').write(json.dumps(state)); {then}"
        )
        command = [sys.executable, "-c", code, str(folder / "state.json"), state]
        started.append(RunProcess(command, folder, folder.with_name(f"{name}.log")))
        return started[-1]

    monkeypatch.setattr(train_runs, "start", start)
    return started


def test_a_completed_run_is_not_waited_for(tmp_path, monkeypatch):
    started = run_that(monkeypatch, "completed", "time.sleep(1000)")
    folder = train_runs.finished(settings(tmp_path), "debug", "long end", [])
    assert folder.is_dir() and started[0].process.returncode is not None
    assert train_runs.finished(settings(tmp_path), "debug", "long end", []) == folder
    assert len(started) == 1


@pytest.mark.long
def test_how_a_run_ends_otherwise(tmp_path, monkeypatch):
    run_that(monkeypatch, "oom", "sys.exit(1)")
    with pytest.raises(train_runs.OutOfMemoryError):
        train_runs.finished(settings(tmp_path), "debug", "large", [])
    run_that(monkeypatch, "failed", "sys.exit(1)")
    with pytest.raises(RuntimeError, match="failed: its words"):
        train_runs.finished(settings(tmp_path), "debug", "faulty", [])
    started = run_that(monkeypatch, "running", "time.sleep(1000)")
    with pytest.raises(NotMeasured, match="time"):
        train_runs.finished(settings(tmp_path, seconds=0.5), "debug", "slow", [])
    assert started[0].process.returncode is not None


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_the_timed_block_keeps_no_gradients_and_counts_full_lengths(attention):
    mode = Mode(attention, "bfloat16")
    shape = (3, 16, 8, 8)
    weights = block.random_weights(TINY, seed=0)
    with built(TINY, mode, "cpu", weights) as model:
        work = block._Work(model, block._batch(shape, TINY, 1.0), mode, "cpu")
        work.both()
        assert len(work.differentiated) > len(list(model.layers[0].parameters()))
        assert all(x.grad is None for x in work.differentiated)
    full, padded = (block._batch(shape, TINY, useful).arguments for useful in (1.0, 0.9))
    masks = ("frame_mask", "text_mask", "speaker_mask", "keep_text", "keep_speaker")
    assert all(full[name].all() for name in masks)
    assert padded["frame_mask"].sum(1).tolist() == [13, 14, 16] and padded["keep_text"].all()


def test_steps_stand_beside_the_other_way_of_running_blocks(tmp_path):
    given = {
        item.name: item.measure.args[2]
        for flavors, tiny in ((("debug",), True), (("800M", "3B"), False))
        for item in steps.items(replace(settings(tmp_path), flavors=flavors, tiny=tiny))
    }
    eagerly = ["--compile.no-enable", "--activation_checkpoint.mode=none"]
    assert given["debug step, micro-batch 1, compiled"] == ["--compile.enable"]
    assert given["800M step, micro-batch 32, eager"] == eagerly
    assert given["3B step, micro-batch 8, eager"] == eagerly
    assert given["debug step, micro-batch 1"] == given["800M step, micro-batch 32"] == []


@pytest.mark.long
def test_sampling_counts_the_networks_rows_and_compares_latents(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(sampling, "model_flavors", lambda: {"tiny": TINY})
    here = settings(tmp_path)
    values = sampling.measure("tiny", "bfloat16", "", 2, here)
    frames, *_, steps = sampling._sizes(here)
    guided = steps // 2
    assert values["rows_per_second"] * values["seconds"] == pytest.approx(2 * (3 * guided + guided))
    assert values["real_time_factor"] == pytest.approx(values["seconds"] / (2 * frames / 25))
    assert 0 < values["largest_difference"] < 0.5 and "passed" not in values
    assert "passed" not in sampling.measure("tiny", "float32", "", 2, here)
    _, expected = sampling.run("tiny", "float32", "", 2, here)
    for wrong, is_passed in ((1e-4, True), (0.1, False), (float("nan"), False)):
        latents = expected.clone()
        latents[1, 3, 5] += wrong

        def compiled(*given, latents=latents):
            return {}, latents if given[2] else expected

        monkeypatch.setattr(sampling, "run", compiled)
        values = sampling.measure("tiny", "float32", "reduce-overhead", 2, here)
        assert values["passed"] is is_passed


@pytest.mark.parametrize(
    "message, error",
    [
        ("cuDNN Frontend error: No valid execution plans built.", NotMeasured),
        ("", NotMeasured),
        ("CUDA error: out of memory", RuntimeError),
    ],
)
def test_a_kernel_that_refuses_is_no_failure(tmp_path, monkeypatch, message, error):
    def refuse(backend, *given):
        raise RuntimeError(message)

    monkeypatch.setattr(ceilings, "_sdpa", refuse)
    with pytest.raises(error, match=message or "no reason") as raised:
        ceilings.forced(TINY, ceilings.SDPBackend.CUDNN_ATTENTION, False, settings(tmp_path))
    assert isinstance(raised.value, NotMeasured) != is_out_of_memory(raised.value)


@pytest.mark.parametrize("option", INDUCTOR_OPTIONS)
def test_an_option_of_inductor_is_on_while_its_mode_is_measured(option):
    mode = Mode(precision="bfloat16", compile="default", option=option)
    assert option in mode.name
    before = torch._inductor.config.get_config_copy()[option]
    with built(TINY, mode, "cpu", random_weights(TINY, seed=0)):
        assert torch._inductor.config.get_config_copy()[option] == INDUCTOR_OPTIONS[option]
    assert torch._inductor.config.get_config_copy()[option] == before != INDUCTOR_OPTIONS[option]
