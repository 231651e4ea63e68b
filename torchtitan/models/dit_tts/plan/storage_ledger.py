"""Notes what tensors are alive during a pass, by their storages."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageLedger(TorchDispatchMode):
    """Notes each storage that operations make: its bytes, when it was born and when it died."""

    def __init__(self, known: Iterable[torch.Tensor]):
        """known: tensors that are not counted."""
        super().__init__()
        self._known = {_key(tensor) for tensor in known}
        self._alive: dict[int, tuple[int, int, weakref.ref]] = {}
        self._dead: list[tuple[int, int, int]] = []
        self._now = 0
        self._paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._now += 1
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            self._note_all(out)
        return out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Storages that are made inside are not noted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add(self, out: Any, transient: int) -> None:
        """Notes the tensors of `out` and that `transient` bytes were alive besides while they were
        made."""
        self._now += 1
        self._dead.append((transient, self._now, self._now))
        self._note_all(out)

    def _note_all(self, out: Any) -> None:
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._note(_key(tensor), tensor.untyped_storage())

    def _note(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._known or key in self._alive:
            return

        def bury(_: weakref.ref) -> None:
            size, born, _ = self._alive.pop(key)
            self._dead.append((size, born, self._now))

        # A storage's object in Python lives as long as the storage.
        self._alive[key] = storage.nbytes(), self._now, weakref.ref(storage, bury)

    def alive(self) -> int:
        """Bytes that are alive now."""
        return sum(size for size, _, _ in self._alive.values())

    def peak(self, without: Iterable[torch.Tensor]) -> int:
        """Most bytes that were alive after any operation, leaving out storages of these tensors."""
        left_out = {_key(tensor) for tensor in without}
        changes = np.zeros(self._now + 2, np.int64)
        for size, born, died in self._dead:
            changes[born] += size
            changes[died + 1] -= size
        for key, (size, born, _) in self._alive.items():
            changes[born] += 0 if key in left_out else size
        return int(changes.cumsum().max())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
