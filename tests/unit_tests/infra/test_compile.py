"""Blocks are compiled in place: one graph for each static shape, shared by all blocks."""

import pytest
import torch
from torch import _TorchCompileInductorWrapper
from torch._dynamo.testing import CompileCounter

from tests.helpers.pretrained_checkpoints import WRITERS
from tests.helpers.small_models import (
    full_inputs,
    initialized_model,
    one_rank,
    random_model,
    small_args,
)
from torchtitan.models.dit_tts.config.job_config import Encoder, JobConfig
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra import parallelize
from torchtitan.models.dit_tts.infra.compat import dynamo_config
from torchtitan.models.dit_tts.infra.compile import (
    apply_compile,
    compile_for_any_lengths,
    compile_frozen,
    compiled_graphs,
    static_shapes,
)
from torchtitan.models.dit_tts.model.initialization import plain_name
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder

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


def frozen(folder, name, dtype, *arguments):
    """A frozen encoder, compiled as [compile] in a run with texts of up to 40 tokens."""
    encoder = load_text_encoder(Encoder(model=str(WRITERS[name](folder)), dtype=dtype), "cpu")
    given = ["--compile.enable", "--compile.components", "text_encoder", "loss"]
    if arguments:
        compile_frozen(encoder, load_config([*given, "--data.max_text_tokens=40", *arguments]))
    return encoder


@torch.no_grad()
def features(encoder, batch: int, dtype=torch.float64):
    lengths = torch.randint(0, 41, (batch, 1), generator=torch.Generator().manual_seed(batch))
    ids = torch.randint(5, 500, (batch, 40), generator=torch.Generator().manual_seed(batch))
    return encoder(ids, torch.arange(40) < lengths).to(dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
def test_a_frozen_text_encoder_is_one_graph_for_each_number_of_rows(tmp_path, name):
    torch._dynamo.reset()
    compiled = frozen(tmp_path, name, "float32", "--compile.backend=eager")
    plain, before, counts = frozen(tmp_path, name, "float32"), compiled_graphs(), []
    for batch in (5, 20, 40, 9, 23, 44):
        found, wanted = features(compiled, batch), features(plain, batch)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        counts.append(compiled_graphs() - before)
    packs = name != "bert"  # which has a row for each text
    assert counts == ([1, 1, 2, 2, 2, 2] if packs else [1, 2, 3, 4, 5, 6])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_inductors_features_are_as_near_as_the_eager_ones(tmp_path, name):
    torch._dynamo.reset()
    wanted = features(frozen(tmp_path, name, "float32").double(), 9)
    for dtype, most in (("float32", 1e-5), ("bfloat16", None)):
        compiled = frozen(tmp_path, name, dtype, "--compile.inductor", "max_autotune_pointwise")
        errors = [
            (features(each, 9) - wanted).norm() / wanted.norm()
            for each in (compiled, frozen(tmp_path, name, dtype))
        ]
        assert 0 < errors[0] <= (most or 1.05 * errors[1])


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
    faster = ["max_autotune_pointwise", "triton.multi_kernel"]
    parallelized(model, "--compile.mode=max-autotune", "--compile.inductor", *faster)
    with dynamo_config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        compile_for_any_lengths(model)  # the decoder's alone, of a sampler
        assert dynamo_config.recompile_limit > 8  # each of several models needs graphs of its own
    of_mode = {**torch._inductor.list_mode_options("max-autotune"), "realize_reads_threshold": 5}
    trained = of_mode | dict.fromkeys(faster, True)
    first = {"backend": "inductor", "fullgraph": True, "dynamic": False, "options": trained}
    sampled = {"dynamic": True, "options": {"realize_reads_threshold": 5}}
    assert options == (3 + 1 + 2) * [first] + 3 * [first | sampled]
    _TorchCompileInductorWrapper(None, trained, False)  # which refuses unknown options and types
