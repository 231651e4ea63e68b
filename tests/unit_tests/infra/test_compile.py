"""Blocks are compiled in place: one graph for each static shape, shared by all blocks."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

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
from torchtitan.models.dit_tts.infra import parallelize
from torchtitan.models.dit_tts.infra.compat import dynamo_config
from torchtitan.models.dit_tts.infra.compile import (
    apply_compile,
    compile_for_any_lengths,
    compiled_graphs,
    static_shapes,
)
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
    before = compiled_graphs()
    for shape in [*SHAPES, *SHAPES]:
        step(model, shape)
    assert compiled_graphs() - before == (2 * kinds + 1) * len(SHAPES)


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
def test_a_trained_text_encoder_is_compiled_for_any_rows(tmp_path, name):
    source = find_source(str(WRITERS[name](tmp_path)))
    sizes = {"text_dim": source.width, "first_condition_id": 512}
    args = small_args(text_encoder=lambda: PretrainedTextEncoder(source), **sizes)
    model, plain = random_model(args), random_model(args)
    torch._dynamo.reset()
    parallelized(model, "--compile.backend=eager", "--activation_checkpoint.mode=full")
    before, compiled = compiled_graphs(), []
    for shapes, (rows, tokens) in enumerate([(9, 80), (12, 95), (14, 60), (11, 90)], start=1):
        batch = full_inputs(args, rows, 16, tokens, 8)
        batch["text_ids"] = torch.randint(5, 500, (rows, tokens))
        batch["text_mask"][::2, 50:] = False
        found = model(**batch)
        torch.testing.assert_close(found, expected := plain(**batch))
        (found.square().mean() + expected.square().mean()).backward()
        compiled.append(
            compiled_graphs() - before - 2 * shapes
        )  # without decoder and speaker encoder
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


def test_every_block_gets_the_mode_also_those_of_the_encoders(model, monkeypatch):
    options = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **each: options.append(each))
    parallelized(model, "--compile.mode=max-autotune")
    with dynamo_config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        compile_for_any_lengths(model, "max-autotune")  # the decoder's alone, of a sampler
        assert dynamo_config.recompile_limit > 8  # each of several models needs graphs of its own
    first = options[0]
    assert options == (3 + 1 + 2) * [first] + 3 * [first | {"dynamic": True}]
    of_mode = torch._inductor.list_mode_options("max-autotune")
    assert first.pop("options") == {**of_mode, "realize_reads_threshold": 5}
    assert first == {"backend": "inductor", "fullgraph": True, "dynamic": False}
