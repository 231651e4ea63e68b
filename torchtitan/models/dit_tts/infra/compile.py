"""Compiles the decoder's blocks in place, and watches that this happens once a static shape.

Only the blocks are compiled: they are alike, so one graph a shape serves all of them. The loss stays
eager: it is a few pointwise kernels once a step, beside those of all blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.utils import counters

from torchtitan.tools.logging import logger

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of [compile] mode that replay kernels from CUDA graphs"""


def apply_compile(
    model: nn.Module, backend: str | Callable, shapes: int, mode: str = "default"
) -> None:
    """Compiles each block in place: a wrapper around it would step past FSDP's hooks.

    Args:
        model: its blocks may be wrapped by activation checkpointing, not yet sharded.
        backend: of torch.compile.
        shapes: static shapes of the data, at most.
        mode: of torch.compile; the backend "inductor" knows what it means.
    """
    config = torch._dynamo.config
    # One graph for each static shape, in training and in evaluation mode; the block with and
    # without checkpointing is other code. Under fullgraph a graph over the limit is an error.
    config.recompile_limit = max(config.recompile_limit, 2 * shapes)
    for layer in model.layers:
        layer.compile(backend=backend, mode=mode, fullgraph=True, dynamic=False)
    logger.info(f"Compiling each block in place with {backend}, mode {mode}")


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled in this process so far, of whatever function."""
    return counters["stats"]["unique_graphs"]


class CompileWatch:
    """Counts the graphs that a model's forward passes make Dynamo compile.

    The blocks need one graph for each static shape and kind of block; each graph beyond that is a
    compilation that costs its minute again and again.
    """

    def __init__(self, model: nn.Module):
        # "Every Nth block" of activation checkpointing wraps some blocks and not others.
        self.kinds = len({type(layer) for layer in model.layers})
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
                f"of block: something beside the data's shapes changes from step to step, and each "
                f"compilation holds the run up; TORCH_LOGS=recompiles says what"
            )
