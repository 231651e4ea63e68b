"""Blocks are compiled in place: one graph for each static shape, shared by all blocks."""

import copy
import logging
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sum
from torchtitan.models.dit_tts.infra import parallelize
from torchtitan.models.dit_tts.infra.compile import CompileWatch, apply_compile, compile_function
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

DIMS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
SHAPES = [(2, 16, 8, 8), (3, 24, 8, 8), (1, 32, 16, 8)]


@pytest.fixture
def model():
    torch._dynamo.reset()
    args = DiTTTSModelArgs(
        dim=32,
        n_layers=3,
        n_heads=2,
        mlp_dim=48,
        speaker_dim=32,
        speaker_n_layers=1,
        speaker_n_heads=2,
        speaker_mlp_dim=48,
        text_dim=32,
        adaln_rank=8,
        timestep_dim=16,
        text_vocab_size=8,
        text_n_layers=2,
        text_n_heads=2,
    )
    model = DiTTTSModel(args)
    with torch.no_grad():
        model.init_weights()
    yield model
    torch._dynamo.reset()


def step(model: DiTTTSModel, shape: tuple[int, int, int, int]) -> None:
    batch, frames, text, speaker = shape
    out = model(
        torch.randn(batch, frames, 128),
        torch.rand(batch),
        torch.ones(batch, frames, dtype=torch.bool),
        torch.zeros(batch, text, dtype=torch.long),
        torch.ones(batch, text, dtype=torch.bool),
        torch.randn(batch, speaker, 128),
        torch.ones(batch, speaker, dtype=torch.bool),
    )
    out.square().mean().backward()


@pytest.mark.long
@pytest.mark.parametrize(
    "components, kinds", [(["model"], 1), (["encoders"], 2), (["model", "encoders"], 3)]
)
def test_one_graph_a_shape_and_then_none(model, components, kinds):
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
def test_the_objectives_functions_are_compiled_once_a_shape():
    """And draw the same problems, of which the compiler may round the last bit otherwise."""
    torch._dynamo.reset()
    add_noise = FlowMatching().add_noise
    counters = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    compiled = [
        compile_function(function, counter, 3)
        for function, counter in zip((add_noise, squared_error_sum), counters)
    ]
    for number, (rows, frames, _, _) in enumerate(SHAPES * 2):
        position = torch.tensor(number), torch.arange(rows), torch.tensor(rows)
        drawn, expected = (
            draw(torch.zeros(rows, frames, 4), *position) for draw in (compiled[0], add_noise)
        )
        for name, value in vars(expected).items():
            torch.testing.assert_close(getattr(drawn, name), value, rtol=0, atol=1e-5)
        mask = torch.rand(rows, frames) > 0.3
        losses = [
            sum_(drawn.latents, drawn.target, mask) for sum_ in (compiled[1], squared_error_sum)
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


@pytest.mark.long
def test_the_limit_follows_the_number_of_buckets(model):
    """Under fullgraph a shape over Dynamo's limit is an error: what the limit is set against."""
    with torch._dynamo.config.patch(recompile_limit=2):
        apply_compile(model, CompileCounter(), shapes=1)
        for frames in (8, 16):
            step(model, (1, frames, 8, 8))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            step(model, (1, 24, 8, 8))


def parallelized(model: DiTTTSModel, *arguments: str) -> DiTTTSModel:
    return parallelize.parallelize_dit_tts(
        model, DIMS, load_config(["--compile.enable", *arguments])
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "checkpointing, kinds",
    [
        (["--activation_checkpoint.mode=full"], 1),
        (
            [
                "--activation_checkpoint.mode=selective",
                "--activation_checkpoint.selective_ac_option=2",
            ],
            2,
        ),
        (
            [
                "--activation_checkpoint.mode=selective",
                "--activation_checkpoint.selective_ac_option=op",
            ],
            1,
        ),
    ],
)
def test_one_graph_a_shape_and_kind_of_block(model, checkpointing, kinds):
    parallelized(model, "--compile.backend=eager", *checkpointing)
    watch = CompileWatch(model, ["model", "encoders"])
    for shapes, shape in enumerate([*SHAPES, *SHAPES], start=1):
        with watch.forward_pass(min(shapes, len(SHAPES))):
            step(model, shape)
    assert watch.graphs == watch.kinds * len(SHAPES)
    assert watch.kinds == kinds + 2  # two encoders


@pytest.mark.long
def test_a_graph_too_many_is_said_once(model, caplog):
    apply_compile(model, CompileCounter(), shapes=3)
    watch = CompileWatch(model)
    logger.propagate = True  # upstream's logger keeps its records to itself
    with caplog.at_level(logging.WARNING, logger.name):
        for scale in (1e-6, 1e-5, 1e-4):
            for layer in model.layers:
                layer.eps = scale  # a constant of the graph that changes
            with watch.forward_pass(1):
                step(model, SHAPES[0])
    said = [record.message for record in caplog.records if "graphs were compiled" in record.message]
    assert len(said) == 1 and "2 graphs were compiled for 1 static shapes" in said[0]


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_every_block_gets_the_mode_also_those_of_the_encoders(model, mode, monkeypatch):
    """What the modes compute is compared on whole runs, in test_parity."""
    options = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **each: options.append(each))
    parallelized(model, f"--compile.mode={mode}")
    [first, *others] = options
    assert others == (2 + 1 + 2) * [first]
    of_mode = torch._inductor.list_mode_options(mode).items()
    assert of_mode <= first.pop("options").items()
    assert first == {"backend": "inductor", "fullgraph": True, "dynamic": False}


def saved_bytes(model: DiTTTSModel) -> int:
    """Bytes that the forward pass keeps for the backward pass, weights included."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(model, (2, 64, 8, 8))
    return sum(kept.values())


@pytest.mark.slow
def test_a_memory_budget_saves_less_and_changes_no_gradient(model):
    with torch.no_grad():  # the zeros of a new model would hide what is behind them
        for parameter in model.parameters():
            parameter.add_(0.1)
    budget = torch._functorch.config.activation_memory_budget
    arguments = ["--compile.backend=aot_eager", "--activation_checkpoint.mode=memory_budget"]
    found = []
    try:
        for share in (1.0, 0.2):
            torch._dynamo.reset()
            each = copy.deepcopy(model)
            parallelized(each, *arguments, f"--activation_checkpoint.memory_budget={share}")
            torch.manual_seed(0)
            kept = saved_bytes(each)
            found.append((kept, [parameter.grad for parameter in each.parameters()]))
    finally:
        torch._functorch.config.activation_memory_budget = budget
    (all_bytes, expected), (fewer_bytes, gradients) = found
    assert fewer_bytes < 0.8 * all_bytes
    for some, other in zip(gradients, expected, strict=True):
        assert torch.allclose(some, other, atol=1e-5) if other is not None else some is None


@pytest.mark.parametrize(
    "arguments, ranks, message",
    [
        (["--compile.mode=reduce-overhead"], 2, "gathered weights of 2 data-parallel ranks"),
        (
            ["--compile.mode=max-autotune", "--parallelism.data_parallel_replicate_degree=2"],
            2,
            "'default' or 'max-autotune-no-cudagraphs'",
        ),
        (
            ["--compile.mode=max-autotune", "--compile.backend=eager"],
            1,
            "only the backend 'inductor'",
        ),
        (
            ["--compile.components=loss", "--activation_checkpoint.mode=memory_budget"],
            1,
            "'memory_budget' needs [compile] enable = true",
        ),
        (["--optimizer.name=Lion"], 1, "allowed are Adam, AdamW and Muon"),
        (["--optimizer.name=Muon", "--optimizer.state_dtype=8bit"], 1, "only with AdamW"),
        (["--optimizer.name=Muon", "--training.enable_cpu_offload"], 2, "enable_cpu_offload"),
        (
            [
                "--optimizer.state_dtype=8bit",
                "--checkpoint.enable",
                "--checkpoint.async_mode=async",
            ],
            1,
            "set async_mode to 'disabled'",
        ),
        (["--optimizer.muon_lr=-1"], 1, "must not be negative"),
    ],
)
def test_settings_that_cannot_work(arguments, ranks, message):
    config = load_config(["--compile.enable", *arguments])
    with pytest.raises(InputError, match=re.escape(message)):
        validate_config(config, ranks, ["debug"])


def test_a_mode_without_cuda_graphs_works_on_ranks():
    config = load_config(["--compile.enable", "--compile.mode=max-autotune-no-cudagraphs"])
    validate_config(config, 2, ["debug"])
