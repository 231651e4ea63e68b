"""Bytes that kernels beside products and attention move: eager ones by the dispatcher, compiled ones by
Inductor's schedule.

- Eager: what each pointwise operation, reduction or copy reads and writes; views are left out. With
  `OneKernelNorms`, `F.rms_norm` counts as the one kernel that it is on a GPU, where the CPU takes five.
- Compiled: what each kernel reads and writes, forward and backward. Of a buffer that a kernel sees a part
  of, that part: Inductor's own sum takes it whole once operations are fused. What is read in two orders
  counts twice.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product")
_NO_WORK = ("empty", "detach")


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements: those that an expanded one repeats count once."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.element_size()


class PointwiseTraffic(TorchDispatchMode):
    """Bytes and number of all operations but products, attention and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.kernels = 0
        self._paused = False

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        self.kernels += 1
        self.bytes += sum(map(bytes_of, tensors))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        yield
        self._paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if self._paused or func.is_view or name.startswith((*_PRODUCTS, *_NO_WORK)):
            return out
        if name == "_unsafe_view":
            return out
        self.add(x for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out


class _OneKernelNorm(torch.autograd.Function):
    """RMSNorm without weight, counted as one kernel forward and one backward, as CUDA has it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, eps: float, traffic: PointwiseTraffic) -> torch.Tensor:
        ctx.traffic = traffic
        with traffic.paused():
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            out = x * scale
        traffic.add([x, scale, out])
        ctx.save_for_backward(x, scale)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x, scale = ctx.saved_tensors
        with ctx.traffic.paused():
            normed = x * scale
            result = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        ctx.traffic.add([grad, x, scale, result])
        return result, None, None


class OneKernelNorms(TorchFunctionMode):
    """Sends `F.rms_norm` without a weight through `_OneKernelNorm`."""

    def __init__(self, traffic: PointwiseTraffic):
        super().__init__()
        self.traffic = traffic

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.rms_norm:
            x, shape = args
            assert kwargs["weight"] is None and len(shape) == 1
            return _OneKernelNorm.apply(x, kwargs["eps"], self.traffic)
        return func(*args, **kwargs)


class CompiledTraffic:
    """Bytes and number of the kernels that were compiled inside `watch`."""

    def __init__(self) -> None:
        self.bytes = 0
        self.kernels = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        from torch._inductor import config
        from torch._inductor.graph import GraphLowering

        lower = GraphLowering.codegen

        def codegen(graph: GraphLowering):
            code = lower(graph)
            self._add(graph)
            return code

        with (
            mock.patch.object(GraphLowering, "codegen", codegen),
            config.patch(force_disable_caches=True),
        ):
            yield

    def _add(self, graph) -> None:
        from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

        for node in graph.scheduler.nodes:
            if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode)):
                self.kernels += 1
                self.bytes += _kernel_bytes(graph, node)


def _kernel_bytes(graph, node) -> int:
    """Of one kernel of Inductor's schedule."""
    from torch._inductor.dependencies import MemoryDep

    # Whole buffers, in bytes, without those that stay inside the kernel.
    whole = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    seen: dict[str, set[tuple]] = defaultdict(set)
    for access in node.read_writes.reads | node.read_writes.writes:
        if isinstance(access, MemoryDep):
            used = [int(n) for v, n in access.ranges.items() if v in access.index.free_symbols]
            seen[access.name].add((access.index, math.prod(used)))
    total = 0
    for name, size in whole.items():
        buffer = graph.name_to_buffer.get(name) or graph.graph_inputs[name]
        elements = sum(count for _, count in seen[name])
        total += min(size, elements * buffer.get_dtype().itemsize) if elements else size
    return total
