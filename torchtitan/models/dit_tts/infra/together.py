"""One action on every rank, whose results and mistakes all ranks learn of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.models.dit_tts.errors import InputError

Result = TypeVar("Result")

# Downloads take as long as they take, and one rank may have the longest shard left to encode.
_PATIENCE = timedelta(days=7)


@contextmanager
def patient_group() -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks whose exchanges wait for as long as downloading a model or encoding a
    dataset can take: those of the default group time out in minutes. A rank that ends is noticed at
    once. None for a process alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def run_on_all_ranks(
    action: Callable[[int], Result], what: str, group: dist.ProcessGroup | None = None
) -> list[Result]:
    """What `action(rank)` returns on each rank. Where it raises on one, no other waits for ever.

    Args:
        action: called with this process's rank; without a process group, 0.
        what: what it does, for a sentence: "load the model".
        group: of all ranks; None: the default one.

    Raises:
        Exception: on the ranks where the action raised, what it raised.
        InputError: on the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [action(0)]
    error, mine = None, None
    try:
        mine = action(dist.get_rank())
    except Exception as raised:
        error = raised
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine, None if error is None else str(error)), group)
    if error is not None:
        raise error
    for rank, (_, sentence) in enumerate(found):
        if sentence is not None:
            raise InputError(f"rank {rank} could not {what}: {sentence}")
    return [result for result, _ in found]
