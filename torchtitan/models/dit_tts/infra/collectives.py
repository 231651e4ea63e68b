"""Collectives: gather Python objects, raise an error on every rank, compare the ranks, sum a tensor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.dit_tts.errors import InputError

T = TypeVar("T")

# Downloading a model or encoding a dataset takes hours; the default groups time out in minutes.
_TIMEOUT = timedelta(days=7)


def single_process() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def long_timeout_group() -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks for collectives that wait for downloads or encoding; None for one process.
    A rank that dies still ends the wait at once."""
    if single_process():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def gather_from_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, by rank."""
    if single_process():
        return [value]
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group)
    return cast(list[T], gathered)


def run_on_all_ranks(
    function: Callable[[int], T], what: str, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Runs function(rank) on every rank and gathers the results.

    Args:
        what: its task, for the error message: "load the model".
        group: of all ranks; None: the default one.

    Raises:
        Exception: the function's own error on ranks where it failed; InputError on the others.
    """
    if single_process():
        return [function(0)]
    error, result = None, None
    try:
        result = function(dist.get_rank())
    except Exception as raised:
        error = raised
    gathered = gather_from_ranks((result, None if error is None else str(error)), group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(gathered):
        if message is not None:
            raise InputError(f"rank {rank} could not {what}: {message}")
    return [cast(T, value) for value, _ in gathered]


def share_of(count: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """(number, whether its result counts) of this rank's part of `count` batches or samples. Every rank has
    as many, since all of them gather sharded weights at once: one without any left repeats the first."""
    numbers = range(rank, -(-count // ranks) * ranks, ranks)
    return [(number, True) if number < count else (0, False) for number in numbers]


def assert_equal_across_ranks(parts: dict[str, Any], what: str = "shards in [data] path") -> None:
    """Raises InputError on every rank if `parts` of `what` differ between ranks. Each computes the order of the data by
    itself: of different copies of it samples would be repeated or never seen, without any error."""
    gathered = gather_from_ranks(parts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(
                    f"rank {rank} would train otherwise than rank 0: its {name} is {other[name]}, "
                    f"rank 0's {value}; every machine must have the same {what}"
                )


def sum_over_samples(value: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    """Sums in place over the ranks that have different samples, and returns the value. The host does not wait
    for it."""
    if dims.dp_enabled:
        dist.all_reduce(value, group=dims.get_mesh("batch").get_group())
    return value
