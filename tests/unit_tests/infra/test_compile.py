"""Blocks are compiled in place: one graph for each static shape, shared by all blocks."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from tests.helpers.small_models import full_inputs, initialized_model, small_args
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sums
from torchtitan.models.dit_tts.infra import parallelize
from torchtitan.models.dit_tts.infra.compat import dynamo_config
from torchtitan.models.dit_tts.infra.compile import (
    CompileWatch,
    apply_compile,
    compile_for_any_lengths,
    compile_function,
)
from torchtitan.models.dit_tts.infra.compile_cache import set_compile_cache
from torchtitan.models.dit_tts.model.model import DiTTTSModel

DIMS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
SHAPES = [(2, 16, 8, 8), (3, 24, 8, 8), (1, 32, 16, 8)]


@pytest.fixture
def model():
    torch._dynamo.reset()
    sizes = dict(n_layers=3, text_vocab_size=8, text_n_layers=2)
    model = initialized_model(small_args(**sizes))
    yield model
    torch._dynamo.reset()


def step(model: DiTTTSModel, shape: tuple[int, int, int, int]) -> None:
    model(**full_inputs(model.args, *shape)).square().mean().backward()


@pytest.mark.long
@pytest.mark.parametrize(
    "components, kinds", [(["model"], 1), (["encoders"], 2), (["model", "encoders"], 3)]
)
def test_one_graph_per_shape(model, components, kinds):
    counter = CompileCounter()
    apply_compile(model, counter, shapes=3, components=components)
    watch = CompileWatch(model, components)
    for count, shape in enumerate(SHAPES, start=1):
        with watch.forward_pass(count):
            step(model, shape)
        assert counter.frame_count == watch.graphs == kinds * count
    for shape in SHAPES * 2:
        with watch.forward_pass(len(SHAPES)):
            step(model, shape)
    assert counter.frame_count == watch.graphs == kinds * len(SHAPES)
    assert watch.kinds == kinds


@pytest.mark.slow
def test_the_objectives_functions_are_compiled_once_per_shape():
    """And draw the same problems, of which the compiler may round the last bit otherwise."""
    torch._dynamo.reset()
    add_noise = FlowMatching(logit_mean_end=1.0).add_noise
    counters = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    compiled = [
        compile_function(function, counter, 3)
        for function, counter in zip((add_noise, squared_error_sums), counters)
    ]
    for number, (rows, frames, _, _) in enumerate(SHAPES * 2):
        position = torch.tensor(number), torch.arange(rows), torch.tensor(rows)
        position += (torch.tensor(number / 9),)  # the progress of the run
        drawn, expected = (
            draw(torch.zeros(rows, frames, 4), *position) for draw in (compiled[0], add_noise)
        )
        for name, value in vars(expected).items():
            torch.testing.assert_close(getattr(drawn, name), value, rtol=0, atol=1e-5)
        mask = torch.rand(rows, frames) > 0.3
        losses = [
            sum_(drawn.latents, drawn.target, mask) for sum_ in (compiled[1], squared_error_sums)
        ]
        torch.testing.assert_close(*losses)
    assert [counter.frame_count for counter in counters] == [len(SHAPES)] * 2


@pytest.mark.long
def test_more_shapes_than_dynamos_default_limit(model):
    counter = CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=8):
        apply_compile(model, counter, shapes=10)
        for frames in range(8, 8 + 10):
            step(model, (1, frames, 8, 8))
    assert counter.frame_count == 10


def parallelized(model: DiTTTSModel, *arguments: str) -> DiTTTSModel:
    return parallelize.parallelize_dit_tts(
        model, DIMS, load_config(["--compile.enable", *arguments])
    )


@pytest.mark.long
@pytest.mark.parametrize("mode, option, kinds", [("full", 2, 1), ("selective", 2, 2)])
def test_one_graph_per_shape_and_kind_of_block(model, mode, option, kinds):
    options = [f"mode={mode}", f"selective_ac_option={option}"]
    checkpointing = [f"--activation_checkpoint.{each}" for each in options]
    parallelized(model, "--compile.backend=eager", *checkpointing)
    watch = CompileWatch(model, ["model", "encoders"])
    for shapes, shape in enumerate([*SHAPES, *SHAPES], start=1):
        with watch.forward_pass(min(shapes, len(SHAPES))):
            step(model, shape)
    assert watch.graphs == watch.kinds * len(SHAPES)
    assert watch.kinds == kinds + 2  # two encoders


@pytest.mark.long
def test_too_many_graphs_are_warned_of_once(model, caplog):
    apply_compile(model, CompileCounter(), shapes=3)
    watch = CompileWatch(model)
    logger.propagate = True  # upstream's logger keeps its records to itself
    with caplog.at_level(logging.WARNING, logger.name):
        for scale in (1e-6, 1e-5, 1e-4):
            for layer in model.layers:
                layer.eps = scale  # a constant of the graph that changes
            with watch.forward_pass(1):
                step(model, SHAPES[0])
    warned = [
        record.message for record in caplog.records if "graphs were compiled" in record.message
    ]
    assert len(warned) == 1 and "2 graphs were compiled for 1 static shapes" in warned[0]


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_every_block_gets_the_mode_also_those_of_the_encoders(model, mode, monkeypatch):
    """What the modes compute is compared on complete runs, in test_parity."""
    options = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **each: options.append(each))
    parallelized(model, f"--compile.mode={mode}")
    [first, *others] = options
    assert others == (2 + 1 + 2) * [first]
    of_mode = torch._inductor.list_mode_options(mode).items()
    assert of_mode <= first.pop("options").items()
    assert first == {"backend": "inductor", "fullgraph": True, "dynamic": False}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Sets the compile cache for a command line; returns its sentence and the variable's value."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def run(*args: str) -> tuple[str, str | None]:
        with mock.patch.dict(os.environ):
            said = set_compile_cache(load_config(list(args)))
            return said, os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    return run


def test_compiled_kernels_are_kept_in_the_user_s_cache_folder(cache, tmp_path):
    folder = str(tmp_path / "titan-tts/compile")
    assert cache() == ("", None) and not os.path.exists(folder)
    for key in ("--compile.enable", "--optimizer.state_dtype=8bit"):
        said, variable = cache(key)
        assert variable == folder and f"{folder} (empty" in said
    Path(folder, "fxgraph").mkdir()
    assert "empty" not in cache("--compile.enable")[0]


def test_a_folder_of_the_user_s_wins(cache, tmp_path, monkeypatch):
    args = ["--compile.enable", f"--compile.cache_folder={tmp_path}/own"]
    assert cache(*args)[1] == f"{tmp_path}/own"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/variable")
    said, variable = cache(*args)
    assert variable == f"{tmp_path}/variable" and "variable (TORCHINDUCTOR_CACHE_DIR; empty" in said


def test_a_cache_folder_that_takes_no_files_is_refused(cache, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match=r"\[compile\] cache_folder: no files .*/file/x .*Not a dir"
    ):
        cache("--compile.enable", f"--compile.cache_folder={tmp_path}/file/x")


def test_each_model_compiled_for_any_lengths_has_graphs_of_its_own():
    """Several are, when systems are compared; they share the code of a block, and its limits."""
    # Not by monkeypatch: what a test has set by it does not exist afterwards.
    with dynamo_config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        for _ in range(3):
            compile_for_any_lengths(SimpleNamespace(layers=[]), "default")
        limits = dynamo_config.recompile_limit, dynamo_config.accumulated_recompile_limit
    assert limits == (8 + 3 * 32,) * 2
