"""A block as the compiler would run it, found on tensors without data.

AOT autograd traces the block forward and backward, Inductor's decompositions are applied and its
min-cut partitioner chooses what the forward pass keeps. Both are the compiler's own, so what is kept is
what a compiled block keeps. Which pointwise operations become one kernel is estimated: all that are
joined and have the same products before them.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.compile import stacks
from torchtitan.models.dit_tts.plan.operations import (
    FUSED,
    POINTWISE,
    Operation,
    OperationRecorder,
    bytes_touched,
    describe,
)
from torchtitan.models.dit_tts.plan.storage_ledger import StorageLedger

_aten = torch.ops.aten


def blocks_compiled(config: JobConfig) -> bool:
    """Whether training compiles the decoder's blocks: enable = true can be of the loss alone."""
    return "model" in compiled_stacks(config)


def compiled_stacks(config: JobConfig) -> tuple[str, ...]:
    """Components of [compile] that are stacks of blocks, where training compiles them."""
    named = ("model", "encoders") if config.compile.enable else ()
    return tuple(name for name in named if name in config.compile.components)


def with_blocks(config: JobConfig, compiled: bool) -> JobConfig:
    """The config with the decoder's blocks compiled, or with nothing compiled."""
    components = list(config.compile.components)
    if "model" not in components:
        components.append("model")
    changed = replace(config.compile, enable=compiled, components=components)
    return replace(config, compile=changed)


class _Plain(nn.Module):
    """Calls a block's own forward, whatever its instance has been given instead."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return type(self.block).forward(self.block, *args, **kwargs)


class BlockCompiler:
    """Compiles blocks of one kind for one shape; all share the graphs of the first.

    What runs is told to `ledger` and `recorder`, where they are set.
    """

    def __init__(self, keep_products: bool = False, budget: float = 1.0):
        """
        Args:
            keep_products: every second product and attention are kept and all else is computed again,
                as selective activation checkpointing by operation has it.
            budget: share of what the compiler would keep, as [activation_checkpoint] memory_budget.
        """
        self.ledger: StorageLedger | None = None
        self.recorder: OperationRecorder | None = None
        self._keep_products = keep_products
        self._budget = budget
        self._compiled: Callable | None = None

    def install(self, blocks: Iterable[nn.Module]) -> bool:
        """Replaces the blocks' forward, in place. Returns whether the graphs are there already; else the
        first pass makes them."""
        for block in blocks:
            block.forward = self._bind(block)
        return self._compiled is not None

    def _bind(self, block: nn.Module) -> Callable:
        plain = _Plain(block)
        parameters = dict(plain.named_parameters())

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            leaves, spec = tree_flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            if self._compiled is None:

                def function(
                    values: list[torch.Tensor], tensors: list[torch.Tensor]
                ) -> torch.Tensor:
                    filled = list(leaves)
                    for place, tensor in zip(places, tensors, strict=True):
                        filled[place] = tensor
                    args, kwargs = tree_unflatten(filled, spec)
                    named = dict(zip(parameters, values, strict=True))
                    return torch.func.functional_call(plain, named, args, kwargs)

                self._compiled = self._compile(function)
            return self._compiled(list(parameters.values()), [leaves[i] for i in places])

        return forward

    def _compile(self, function: Callable) -> Callable:
        from functorch.compile import (
            aot_function,
            make_boxed_func,
            min_cut_rematerialization_partition,
        )
        from torch._inductor.decomposition import select_decomp_table

        def compiler(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
            return make_boxed_func(self._watched(graph))

        def partition(
            joint: fx.GraphModule, *args: Any, **kwargs: Any
        ) -> tuple[fx.GraphModule, ...]:
            if self._keep_products:
                _tag_products(joint.graph)
            with functorch_config.patch(activation_memory_budget=self._budget):
                return min_cut_rematerialization_partition(
                    joint, *args, compiler="inductor", **kwargs
                )

        return aot_function(
            function,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )

    def _watched(self, graph: fx.GraphModule) -> Callable:
        """Runs a graph and tells what its kernels would move and hold."""
        kernels = fused_kernels(graph.graph)
        operations = [kernel.operation for kernel in kernels]
        transient = most_alive(graph.graph, kernels)

        def run(*args: torch.Tensor) -> Any:
            if self.ledger is None or self.recorder is None:
                return graph(*args)
            with self.ledger.paused(), self.recorder.paused():
                out = graph(*args)
            self.recorder.add(operations)
            self.ledger.add(out, transient)
            return out

        return run


class ModelCompiler:
    """Compiles a model's stacks of like blocks for one shape, each by a `BlockCompiler` of its own."""

    def __init__(self, components: Sequence[str], keep_products: bool = False, budget: float = 1.0):
        """
        Args:
            components: as `compiled_stacks` names them.
            keep_products, budget: of the decoder's blocks. A budget is the encoders' too, in training;
                what they keep is too little for that to be told here.
        """
        self.decoder = "model" in components
        self._components = components
        self._options = keep_products, budget
        self._compilers: list[BlockCompiler] = []

    def install(self, model: nn.Module) -> bool:
        """As `BlockCompiler.install`."""
        found = stacks(model, self._components)
        if not self._compilers:
            self._compilers = [
                BlockCompiler(*self._options) if layers is model.layers else BlockCompiler()
                for layers in found
            ]
        pairs = zip(self._compilers, found, strict=True)
        return all([compiler.install(layers) for compiler, layers in pairs])

    def watch(self, ledger: StorageLedger | None, recorder: OperationRecorder | None) -> None:
        """Whom to tell what runs from now on."""
        for compiler in self._compilers:
            compiler.ledger, compiler.recorder = ledger, recorder


def _tag_products(graph: fx.Graph) -> None:
    """As upstream's policy by operation: attention and every second product are kept."""
    products = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        if "_scaled_dot_product" in str(node.target):
            continue  # several outputs: each is kept, and the operation is never run twice
        keep = node.target is operator.getitem and "_scaled_dot_product" in str(node.args[0].target)
        if node.target is _aten.mm.default:
            products += 1
            keep = products % 2 == 1
        policy = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 0


@dataclass
class Kernel:
    """One or more operations that run as one."""

    operation: Operation
    members: list[fx.Node]
    reads: set[fx.Node]
    writes: set[fx.Node]
    """values as the nodes that own their memory"""


def fused_kernels(graph: fx.Graph) -> list[Kernel]:
    """Kernels of a graph, each after those that it reads from.

    Values are written that a product, attention or the caller reads, and sums; all others are computed
    again where they are read. Values that have the same products before them and read something in
    common are one kernel.
    """
    owners = {node: _owner(node) for node in graph.nodes}
    operations = {
        node: describe(node.target, list(_tensors(node.args)), list(_values(node)))
        for node in graph.nodes
        if node.op == "call_function" and owners[node] is node
    }
    written = {node for node, each in operations.items() if _is_written(node, each)}
    for node in graph.nodes:
        if node.op == "output" or operations.get(node) and operations[node].kind != POINTWISE:
            written |= {owners[n] for n in node.all_input_nodes} & operations.keys()
    # Of each value what it reads from memory itself: views by their owner.
    reads: dict[fx.Node, dict[fx.Node, set[fx.Node]]] = {}
    after: dict[fx.Node, int] = defaultdict(
        int
    )  # products and attention on the longest way to a node
    groups: list[list[fx.Node]] = []
    for node, operation in operations.items():
        reads[node] = defaultdict(set)
        for n in node.all_input_nodes:
            owner = owners[n]
            if owner in written or owner not in operations:
                reads[node][owner].add(n)
            else:
                for each, views in reads[owner].items():
                    reads[node][each] |= views
        if node not in written or operation is None:
            continue
        after[node] = max((after[owner] for owner in reads[node]), default=0)
        if operation.kind != POINTWISE:
            after[node] += 1
            groups.append([node])
            continue
        near = {*reads[node], node}
        joined = [
            group
            for group in groups
            if operations[group[0]].kind == POINTWISE
            and after[group[0]] == after[node]
            and any(near & {*reads[member], member} for member in group)
        ]
        groups = [group for group in groups if group not in joined]
        groups.append([member for group in joined for member in group] + [node])
    used: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for number, group in enumerate(groups):
        for member in group:
            for owner in reads[member]:
                used[owner].add(number)
    results = {owners[n] for n in graph.output_node().all_input_nodes}
    found = [
        _kernel(group, operations, reads, {n for n in group if n in results or used[n] - {number}})
        for number, group in enumerate(groups)
    ]
    return sorted(found, key=lambda kernel: min(after[n] for n in kernel.members))


def _is_written(node: fx.Node, operation: Operation | None) -> bool:
    """Whatever reads it."""
    if operation is None or operation.kind != POINTWISE:
        return True
    return node.target in (_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim)


def _kernel(
    group: list[fx.Node],
    operations: dict[fx.Node, Operation | None],
    reads: dict[fx.Node, dict[fx.Node, set[fx.Node]]],
    writes: set[fx.Node],
) -> Kernel:
    shown: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for member in group:
        for owner, views in reads[member].items():
            if owner not in group:
                shown[owner] |= views
    operation = operations[group[0]]
    if operation.kind == POINTWISE:
        # Of each value the parts that views show, at most the whole.
        size = sum(
            min(_touched(owner), sum(map(_touched, views))) for owner, views in shown.items()
        )
        operation = Operation(FUSED, (0, 0, 0, 0, 0), size + sum(map(_touched, writes)))
    return Kernel(operation, group, set(shown), writes)


def most_alive(graph: fx.Graph, kernels: list[Kernel]) -> int:
    """Most bytes of values between kernels that are alive at once; not inputs and outputs."""
    results = {_owner(node) for node in graph.output_node().all_input_nodes}
    last = {node: i for i, kernel in enumerate(kernels) for node in kernel.reads}
    alive: dict[fx.Node, int] = {}
    most = 0
    for i, kernel in enumerate(kernels):
        for node in kernel.writes - results:
            alive[node] = _touched(node)
        most = max(most, sum(alive.values()))
        for node in [node for node in alive if last.get(node, i) <= i]:
            del alive[node]
    return most


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows; an output of several is its operation's."""
    while node.op == "call_function":
        target = node.target
        view = isinstance(target, torch._ops.OpOverload) and target.is_view
        if not (view or target in (operator.getitem, _aten._unsafe_view.default)):
            break
        node = node.all_input_nodes[0]
    return node


def _values(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_flatten(args)[0]:
        if isinstance(leaf, fx.Node):
            yield from _values(leaf)


def _touched(node: fx.Node) -> int:
    return sum(map(bytes_touched, _values(node)))
