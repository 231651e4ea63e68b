"""Compiles blocks in place and the objective's functions, and watches that this happens once a static
shape.

Of the model only blocks are compiled, the decoder's and the learned encoders': those of one stack are
alike, so one graph a shape serves all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.model.encoders import ByteEncoder, SpeakerEncoder
from torchtitan.tools.logging import logger

_MOST_READS = 5
"""Reads up to which Inductor computes a value again for each reader instead of storing it in float32.
The gradient of a rotated and normed query has one more than its default of 4; 7 % of a block's
pointwise traffic."""

_FUNCTIONS = 2
"""of the objective, that the component "loss" compiles: the corruption and the loss itself"""


def static_shapes(data: Data) -> int:
    """Shapes of batches that [data] leads to, at most: one for each bucket."""
    return len(data.bucket_frames) or data.num_buckets


def stacks(model: nn.Module, components: Sequence[str]) -> list[nn.ModuleList]:
    """The stacks of like blocks that [compile] components name. A pretrained text encoder has none:
    its blocks are another package's code."""
    found = [model.layers] if "model" in components else []
    if "encoders" in components:
        for encoder in (model.speaker_encoder, model.text_encoder):
            if isinstance(encoder, (SpeakerEncoder, ByteEncoder)):
                found.append(encoder.layers)
    return found


def apply_compile(
    model: nn.Module,
    backend: str | Callable,
    shapes: int,
    mode: str = "default",
    components: Sequence[str] = ("model",),
) -> None:
    """Compiles each block in place: a wrapper around it would step past FSDP's hooks.

    Args:
        model: its blocks may be wrapped by activation checkpointing, not yet sharded.
        backend: of torch.compile.
        shapes: static shapes of the data, at most.
        mode: of torch.compile; only the backend "inductor" has modes.
        components: "model" for the decoder's blocks, "encoders" for those of the learned encoders.
    """
    compiled = stacks(model, components)
    # In training and in evaluation mode; the block with and without checkpointing is other code, but
    # both encoders' blocks are one.
    _allow_graphs(2 * shapes * len(compiled))
    options = compile_options(mode) if backend == "inductor" else None
    for layers in compiled:
        for layer in layers:
            layer.compile(backend=backend, options=options, fullgraph=True, dynamic=False)
    logger.info(
        f"Compiling each block of {len(compiled)} stacks in place with {backend}, mode {mode}"
    )


def compile_options(mode: str) -> dict[str, Any]:
    """Inductor's options for a mode of torch.compile, and ours for the blocks."""
    return {**torch._inductor.list_mode_options(mode), "realize_reads_threshold": _MOST_READS}


def compile_function(function: Callable, backend: str | Callable, shapes: int) -> Callable:
    """One of the objective's functions, compiled for each of at most `shapes` static shapes. They are
    pointwise: there are no products to choose kernels for, so [compile] mode is not theirs."""
    _allow_graphs(shapes)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def _allow_graphs(count: int) -> None:
    """Of one code. Under fullgraph a graph over Dynamo's limit is an error."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled in this process so far, of whatever function."""
    return counters["stats"]["unique_graphs"]


class CompileWatch:
    """Counts the graphs that a model's forward passes make Dynamo compile.

    Each static shape needs one graph for each kind of block, and each function of the objective that
    is compiled; a graph beyond that is a compilation that costs its minute again and again.
    """

    def __init__(self, model: nn.Module, components: Sequence[str] = ("model",)):
        # "Every Nth block" of activation checkpointing wraps some blocks and not others.
        kinds = (len({type(layer) for layer in layers}) for layers in stacks(model, components))
        self.kinds = sum(kinds) + _FUNCTIONS * ("loss" in components)
        self.graphs = 0
        self._warned = False

    @contextmanager
    def forward_pass(self, shapes: int) -> Iterator[None]:
        """Around a forward pass; `shapes` is the number of static shapes seen so far, with it."""
        before = compiled_graphs()
        yield
        self.graphs += compiled_graphs() - before
        if self.graphs > shapes * self.kinds and not self._warned:
            self._warned = True
            logger.warning(
                f"{self.graphs} graphs were compiled for {shapes} static shapes and {self.kinds} kinds "
                f"of graph: something beside the data's shapes changes from step to step, and each "
                f"compilation holds the run up; TORCH_LOGS=recompiles says what"
            )
