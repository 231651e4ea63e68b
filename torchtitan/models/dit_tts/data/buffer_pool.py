"""Memory of padded batches, reused as soon as nobody holds the batch."""

import math
import weakref
from collections import deque

import numpy as np
import torch


class BufferPool:
    """Lends float32 tensors out of blocks of one size.

    A batch is tens of MiB. In newly allocated memory the kernel zeroes each page at the first
    touch, which costs as much as filling the batch. A block comes back when the last tensor over it
    is gone, so there are as many blocks as batches were alive at once. Thread-safe. `largest`:
    maximum number of elements of a tensor.
    """

    def __init__(self, largest: int):
        self._largest = largest
        self._free: deque[np.ndarray] = deque()

    def tensor(self, *shape: int) -> torch.Tensor:
        """Uninitialised."""
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(self._largest, np.float32)
        # torch keeps this very array as long as the tensor's storage lives.
        lent = block[: math.prod(shape)]
        weakref.finalize(lent, self._free.append, block).atexit = False
        return torch.from_numpy(lent).view(shape)
