"""Operations of a training pass: products, attention and the bytes of everything else.

A recorder watches a pass over tensors without data. Each operation is a row: the sizes that its FLOPs
are the product of, and the bytes that it reads and writes. Rows of two passes that differ in the number
of samples or frames match one to one, so that the sizes of any other can be told from them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PRODUCT, ATTENTION, POINTWISE, FUSED = range(4)
"""kinds of operations; FUSED is a compiled pointwise kernel"""

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
"""operation -> position of its left factor"""

# Two products forward; backward the scores again and four more.
_ATTENTION = "_scaled_dot_product_"
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


@dataclass(frozen=True)
class Operation:
    """One kernel."""

    kind: int
    factors: tuple[float, float, float, float, float]
    """their product is the FLOPs: a constant, and up to four sizes"""

    size: int
    """bytes read and written, with perfect reuse"""


def describe(
    func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> Operation | None:
    """An operation's row; None where nothing is computed or moved."""
    if isinstance(func, torch._ops.OpOverload) and func.is_view or not outputs:
        return None
    size = sum(map(bytes_touched, [*inputs, *outputs]))
    name = str(func)
    if func in _PRODUCTS:
        left, right = inputs[_PRODUCTS[func] :][:2]
        batch = left.shape[0] if left.dim() == 3 else 1
        return Operation(PRODUCT, (2, batch, left.shape[-2], left.shape[-1], right.shape[-1]), size)
    if _ATTENTION in name:
        backward = "backward" in name
        # The backward pass is given the gradient first; then, as forward, q (B, H, T, K) and k.
        q, k = inputs[1:3] if backward else inputs[:2]
        flops = _BACKWARD_FLOPS if backward else _FORWARD_FLOPS
        sizes = (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
        return Operation(ATTENTION, (flops, *sizes), size)
    if "empty" in name:  # memory is taken, nothing is written
        return None
    return Operation(POINTWISE, (0, 0, 0, 0, 0), size)


def bytes_touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements: those that an expanded one repeats count once."""
    numbers = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride()):
        numbers *= length if stride else 1
    return numbers


@dataclass(frozen=True)
class Operations:
    """Rows of one pass as arrays, one entry an operation."""

    kind: np.ndarray
    backward: np.ndarray
    """(n,) bool"""

    factors: np.ndarray
    """(n, 5)"""

    size: np.ndarray
    """(n,) bytes"""

    def matches(self, other: "Operations") -> bool:
        """Whether rows match those of another pass."""
        return np.array_equal(self.kind, other.kind) and np.array_equal(
            self.backward, other.backward
        )


class OperationRecorder(TorchDispatchMode):
    """Notes each operation of a pass. `backward` is to be set when the backward pass begins."""

    def __init__(self) -> None:
        super().__init__()
        self.backward = False
        self._paused = False
        self._rows: list[tuple[Operation, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            inputs = [a for a in tree_iter((args, kwargs)) if isinstance(a, torch.Tensor)]
            outputs = [a for a in tree_iter(out) if isinstance(a, torch.Tensor)]
            operation = describe(func, inputs, outputs)
            if operation is not None:
                self.add([operation])
        return out

    def add(self, operations: list[Operation]) -> None:
        self._rows += [(operation, self.backward) for operation in operations]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not noted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def operations(self) -> Operations:
        rows = self._rows
        return Operations(
            np.array([operation.kind for operation, _ in rows], np.int8),
            np.array([backward for _, backward in rows], bool),
            np.array([operation.factors for operation, _ in rows], float).reshape(-1, 5),
            np.array([operation.size for operation, _ in rows], float),
        )
