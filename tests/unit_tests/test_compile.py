"""Blocks are compiled in place: one graph for each static shape, shared by all blocks."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from torchtitan.models.dit_tts.infra.parallelize import apply_compile
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

SHAPES = [(2, 16, 8, 8), (3, 24, 8, 8), (1, 32, 16, 8)]


@pytest.fixture
def model():
    torch._dynamo.reset()
    args = DiTTTSModelArgs(
        dim=32, n_layers=3, n_heads=2, mlp_dim=48, speaker_dim=32, speaker_n_layers=1,
        speaker_n_heads=2, speaker_mlp_dim=48, text_dim=32, adaln_rank=8, timestep_dim=16,
    )  # fmt: skip
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
        text_features=torch.randn(batch, text, 32),
    )
    out.square().mean().backward()


def test_one_graph_a_shape_and_then_none(model):
    counter = CompileCounter()
    apply_compile(model, counter)
    for count, shape in enumerate(SHAPES, start=1):
        step(model, shape)
        assert counter.frame_count == count
    for shape in SHAPES * 2:
        step(model, shape)
    assert counter.frame_count == len(SHAPES)


def test_more_shapes_than_dynamos_default_limit(model):
    counter = CompileCounter()
    apply_compile(model, counter)
    for frames in range(8, 8 + 10):
        step(model, (1, frames, 8, 8))
    assert counter.frame_count == 10
