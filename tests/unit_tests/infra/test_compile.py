"""Blocks are compiled in place: one graph for each static shape, shared by all blocks."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torchtitan.tools.logging import logger

from tests.helpers.pretrained_checkpoints import WRITERS
from tests.helpers.small_models import (
    full_inputs,
    initialized_model,
    one_rank,
    random_model,
    small_args,
)
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import parallelize
from torchtitan.models.dit_tts.infra.compat import dynamo_config
from torchtitan.models.dit_tts.infra.compile import (
    CompileWatch,
    apply_compile,
    compile_for_any_lengths,
    static_shapes,
)
from torchtitan.models.dit_tts.infra.compile_cache import set_compile_cache
from torchtitan.models.dit_tts.model.initialization import plain_name
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

SHAPES = [(2, 16, 8, 8), (1, 32, 16, 8)]


@pytest.fixture
def model():
    torch._dynamo.reset()
    yield initialized_model(small_args(n_layers=3, text_vocab_size=8, text_n_layers=2))
    torch._dynamo.reset()


def step(model: DiTTTSModel, shape: tuple[int, int, int, int]) -> None:
    model(**full_inputs(model.args, *shape)).square().mean().backward()


def parallelized(model: DiTTTSModel, *arguments: str) -> None:
    config = load_config(["--compile.enable", *arguments])
    parallelize.parallelize_dit_tts(model, one_rank(), config)


@pytest.mark.long
@pytest.mark.parametrize("mode, kinds", [("full", 1), ("selective", 2)])
def test_one_graph_per_shape_and_kind_of_block(model, mode, kinds):
    """Checkpointing of every second block makes two kinds of blocks in the decoder and, with it, in the text
    encoder of two blocks; which kind the speaker encoder's only block is, upstream counts."""
    checkpointing = [f"mode={mode}", "selective_ac_option=2"]
    arguments = [f"--activation_checkpoint.{each}" for each in checkpointing]
    parallelized(model, "--compile.backend=eager", *arguments)
    watch = CompileWatch(model, ["model", "encoders"])
    for shapes, shape in enumerate([*SHAPES, *SHAPES], start=1):
        with watch.forward_pass(min(shapes, len(SHAPES))):
            step(model, shape)
    assert watch.graphs == watch.kinds * len(SHAPES)
    assert watch.kinds == 2 * kinds + 1
    assert CompileWatch(model, ["model", "loss"]).kinds == kinds + 2  # two functions


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
def test_a_trained_text_encoder_is_compiled_for_any_rows(tmp_path, name):
    source = find_source(str(WRITERS[name](tmp_path)))
    sizes = {"text_dim": source.width, "first_condition_id": 512}
    args = small_args(text_encoder=lambda: PretrainedTextEncoder(source), **sizes)
    model, plain = random_model(args), random_model(args)
    torch._dynamo.reset()
    parallelized(model, "--compile.backend=eager", "--activation_checkpoint.mode=full")
    watch, compiled = CompileWatch(model, ["model", "encoders"]), []
    for shapes, (rows, tokens) in enumerate([(9, 80), (12, 95), (14, 60), (11, 90)], start=1):
        batch = full_inputs(args, rows, 16, tokens, 8)
        batch["text_ids"] = torch.randint(5, 500, (rows, tokens))
        batch["text_mask"][::2, 50:] = False
        with watch.forward_pass(shapes):
            found = model(**batch)
        torch.testing.assert_close(found, expected := plain(**batch))
        (found.square().mean() + expected.square().mean()).backward()
        compiled.append(watch.graphs - 2 * shapes)  # without decoder and speaker encoder
    # A static bias of T5's first block is compiled once more when its shape has changed.
    assert compiled[1] <= 3 and compiled[1:] == compiled[1:2] * 3
    gradients = [
        {plain_name(n): p.grad for n, p in each.named_parameters() if p.grad is not None}
        for each in (model, plain)
    ]
    assert any("text_encoder.core" in n for n in gradients[0])
    torch.testing.assert_close(*gradients)


def test_a_shape_for_each_bucket():
    config = JobConfig()
    config.data.num_buckets = 5
    assert static_shapes(config) == 5
    config.data.bucket_frames = [64, 768]
    assert static_shapes(config) == 2


@pytest.mark.long
def test_more_shapes_than_dynamos_default_limit(model):
    counter = CompileCounter()
    with dynamo_config.patch(recompile_limit=2):
        apply_compile(model, counter, shapes=2)
        for frames in range(8, 8 + 4):
            step(model, (1, frames, 8, 8))
    assert counter.frame_count == 4


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
    warned = [each.message for each in caplog.records if "graphs were compiled" in each.message]
    assert len(warned) == 1 and "2 graphs were compiled for 1 static shapes" in warned[0]


def test_every_block_gets_the_mode_also_those_of_the_encoders(model, monkeypatch):
    options = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **each: options.append(each))
    parallelized(model, "--compile.mode=max-autotune")
    with dynamo_config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        compile_for_any_lengths(model, "max-autotune")  # the decoder's alone, of a sampler
    first = options[0]
    assert options == (3 + 1 + 2) * [first] + 3 * [first | {"dynamic": True}]
    of_mode = torch._inductor.list_mode_options("max-autotune")
    assert first.pop("options") == {**of_mode, "realize_reads_threshold": 5}
    assert first == {"backend": "inductor", "fullgraph": True, "dynamic": False}


def test_several_models_compiled_for_any_lengths_have_graphs_of_their_own():
    """They share the code of a block, and its limits."""
    # Not by monkeypatch: what a test has set by it does not exist afterwards.
    with dynamo_config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        for _ in range(3):
            compile_for_any_lengths(SimpleNamespace(layers=[]), "default")
        limits = dynamo_config.recompile_limit, dynamo_config.accumulated_recompile_limit
    assert limits == (8 + 3 * 32,) * 2


@pytest.mark.long
def test_the_folder_of_compiled_kernels(monkeypatch, tmp_path):
    """The user's cache folder, the config's, or the environment's; nothing without compilation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def cache(*args: str) -> tuple[str, str | None]:
        with mock.patch.dict(os.environ):
            said = set_compile_cache(load_config(list(args)))
            return said, os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    folder = str(tmp_path / "titan-tts/compile")
    assert cache() == ("", None) and not os.path.exists(folder)
    for key in ("--compile.enable", "--optimizer.state_dtype=8bit"):
        said, variable = cache(key)
        assert variable == folder and f"{folder} (empty" in said
    Path(folder, "fxgraph").mkdir()
    assert "empty" not in cache("--compile.enable")[0]
    own = ["--compile.enable", f"--compile.cache_folder={tmp_path}/own"]
    assert cache(*own)[1] == f"{tmp_path}/own"
    (tmp_path / "file").touch()
    sentence = r"\[compile\] cache_folder: no files .*/file/x .*Not a dir"
    with pytest.raises(InputError, match=sentence):
        cache("--compile.enable", f"--compile.cache_folder={tmp_path}/file/x")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/variable")
    assert cache(*own)[1] == f"{tmp_path}/variable"
