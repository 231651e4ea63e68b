"""Counts the operations that torch runs."""

from collections import Counter, defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Calls(TorchDispatchMode):
    """Calls of operations, and the dtypes of the tensors given to them, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.of[name] += 1
        self.dtypes[name] |= {x.dtype for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))
