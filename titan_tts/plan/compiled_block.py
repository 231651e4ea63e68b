"""What compiled blocks keep for the backward pass, found on tensors without data.

AOT autograd traces a block forward and backward with Inductor's decompositions, and Inductor's min-cut
partitioner chooses what the forward graph hands to the backward graph. Both are the compiler's own, so
the saved bytes are a compiled block's. The graphs then run operation by operation, so that the
working memory is an upper bound: Inductor's fused kernels hold fewer values at once.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan.models.dit_tts.infra.compat import functorch_config, tree_flatten, tree_unflatten
from torchtitan.models.dit_tts.infra.compile import stacks


class _Plain(nn.Module):
    """Calls a block's own forward, whatever its instance has been given instead."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return type(self.block).forward(self.block, *args, **kwargs)


class BlockCompiler:
    """Compiles equal blocks; all share the graphs of the first, one pair for each shape."""

    def __init__(self, keep_products: bool = False, budget: float = 1.0):
        """keep_products: every second matmul and attention are saved and all else is recomputed, as selective
        activation checkpointing by operation does."""
        self.graphs: list[list[str]] = []
        """operations of each graph; two shapes' graphs differ where the compiler decided otherwise"""
        self.keeps_products = keep_products
        self._budget = budget
        self._compiled: dict[Any, Callable] = {}

    def install(self, blocks: Iterable[nn.Module]) -> None:
        """Replaces the blocks' forward in place. The first pass of a shape makes its graphs."""
        for block in blocks:
            block.forward = self._bind(block)

    def _bind(self, block: nn.Module) -> Callable:
        plain = _Plain(block)
        parameters = dict(plain.named_parameters())

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            leaves, spec = tree_flatten((args, kwargs))
            positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            tensors, values = [leaves[i] for i in positions], list(parameters.values())
            key = torch.is_autocast_enabled("cpu"), *((t.shape, t.dtype) for t in tensors + values)
            if key not in self._compiled:

                def function(
                    values: list[torch.Tensor], tensors: list[torch.Tensor]
                ) -> torch.Tensor:
                    filled = list(leaves)
                    for position, tensor in zip(positions, tensors, strict=True):
                        filled[position] = tensor
                    args, kwargs = tree_unflatten(filled, spec)
                    named = dict(zip(parameters, values, strict=True))
                    return torch.func.functional_call(plain, named, args, kwargs)

                self._compiled[key] = self._compile(function)
            return self._compiled[key](values, tensors)

        return forward

    def _compile(self, function: Callable) -> Callable:
        from functorch.compile import (
            aot_function,
            make_boxed_func,
            min_cut_rematerialization_partition,
        )
        from torch._inductor.decomposition import select_decomp_table

        def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
            self.graphs.append([str(node.target) for node in gm.graph.nodes])
            return make_boxed_func(gm)

        def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
            if self.keeps_products:
                _tag_products(joint.graph)
            with functorch_config.patch(activation_memory_budget=self._budget):
                return min_cut_rematerialization_partition(
                    joint, inputs, compiler="inductor", **kwargs
                )

        return aot_function(
            function,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )


class ModelCompiler:
    """Compiles a model's stacks of equal blocks, each by its own `BlockCompiler`."""

    def __init__(
        self,
        components: Sequence[str],
        decoder: BlockCompiler | None = None,
        encoders: dict[tuple[type, bool], BlockCompiler] | None = None,
    ):
        """
        components: as `compiled_stacks` names them.
        encoders: by the class of their blocks and `keeps_products`, kept from model to model. In training a
            budget holds for these too; what they save is too little to matter here.
        """
        self.components = tuple(components)
        self.decoder = decoder or BlockCompiler()
        self._encoders = {} if encoders is None else encoders

    def install(self, model: nn.Module) -> None:
        for layers in stacks(model, self.components):
            compiler = self.decoder
            if layers is not model.layers:
                kind = type(layers[0]), self.decoder.keeps_products
                compiler = self._encoders.setdefault(kind, BlockCompiler(kind[1]))
            compiler.install(layers)

    @property
    def traced(self) -> int:
        return sum(len(each.graphs) for each in (self.decoder, *self._encoders.values()))


def _tag_products(graph: fx.Graph) -> None:
    """As upstream's policy by operation: attention and every second matmul are saved."""
    products = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        if "_scaled_dot_product" in str(node.target):
            continue  # several outputs: each is saved, and the operation is never run twice
        keep = node.target is operator.getitem and "_scaled_dot_product" in str(node.args[0])
        if node.target is torch.ops.aten.mm.default:
            products += 1
            keep = products % 2 == 1
        policy = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 0
