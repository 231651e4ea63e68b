"""What the ranks of a process group do in tests of TransformerEngine's layers, on a stand-in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers import transformer_engine
from tests.helpers.small_models import assert_equal, initialized_model, random_model
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.train_spec import get_train_spec

ENGINE = "--megatron.transformer_impl=transformer_engine"
ATTENTION, FP8 = "--megatron.use_te_attn", "--megatron.fp8"


def install() -> None:
    with pytest.raises(InputError, match=r"--no-build-isolation 'titan-tts\[transformer-engine\]'"):
        ranks.begin((dist.get_world_size(), 1, 1), ENGINE)
    transformer_engine.install()


def engine(function: Callable, *arguments: Any) -> None:
    """A job of `tensor_parallel_ranks`, whose layouts compute by TransformerEngine's layers, and attend by it if asked."""
    args = replace(ranks.ARGS, attention="varlen" if ATTENTION in arguments else "auto")
    transformer_engine.calls.clear()
    with mock.patch.multiple(ranks, CONFIG=[*ranks.CONFIG, ENGINE], ARGS=args):
        function(*arguments)
    assert transformer_engine.calls["Linear"] > 0
    assert (transformer_engine.calls["DotProductAttention"] > 0) == (ATTENTION in arguments)


def materialized(layout: ranks.Layout, folder: Path) -> None:
    """A model from the meta device has the plain one's initial weights, and they have each other's
    checkpoints, to the bit."""
    with torch.device("meta"):
        model = DiTTTSModel(ranks.ARGS)
    config = load_config([*ranks.CONFIG, ENGINE])
    get_train_spec().parallelize_fn(model, ranks.dims_of(layout), config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    drawn, plain, loaded = (random_model(ranks.ARGS, seed).state_dict() for seed in (1, 2, 3))
    steps = [(model.state_dict(), drawn), (plain, model.state_dict()), (model.state_dict(), loaded)]
    for number, (saved, target) in enumerate(steps):
        dcp.save(saved, checkpoint_id=folder / f"{number} {layout}")
        dcp.load(target, checkpoint_id=folder / f"{number} {layout}")
    assert_equal(drawn, initialized_model(ranks.ARGS, seed=0).state_dict())
    assert_equal(loaded, plain)


def fp8(layout: ranks.Layout) -> None:
    """Every product is in fp8 with rows that are no multiple of 16, and none has a state; sizes that fp8 does
    not take are refused."""
    engine(ranks.compare, layout, FP8)
    model = ranks.begin(layout, ENGINE, FP8).model
    model(**{name: value[:3] for name, value in ranks.batch(0).items()})
    layers = [each for each in model.modules() if isinstance(each, transformer_engine.Linear)]
    assert len(layers) == 6 * ranks.ARGS.n_layers and all(layer.fp8 for layer in layers)
    assert list(model.state_dict()) == list(random_model(ranks.ARGS).state_dict())
    model.load_state_dict(model.state_dict(), strict=True)
    with pytest.raises(InputError, match="24 inputs and 32 outputs on a GPU.*multiples of 16"):
        ranks.begin((1, 1, 2), ENGINE, FP8)
