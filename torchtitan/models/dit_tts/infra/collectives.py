"""Collectives of Python objects: gather results, raise an error on every rank, compare the ranks; and sums."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.tools.utils import device_type

T = TypeVar("T")

# Downloading a model or encoding a dataset takes hours; the default groups time out in minutes.
_TIMEOUT = timedelta(days=7)


def single_process() -> bool:
    """Whether no other rank is there."""
    return not dist.is_initialized() or dist.get_world_size() == 1


@contextmanager
def one_thread_on_cpu_ranks() -> Iterator[None]:
    """For the exchange of large objects: gloo's own threads, which live as long as the run, copy them.

    A copy of more than one thread there opens an OpenMP team beside the main thread's. libgomp then counts
    more threads than CPUs and lets none of them spin, which slows every later step.
    """
    if single_process() or device_type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def long_timeout_group() -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks for collectives that wait for downloads or encoding; None for one process.

    A rank that dies is noticed at once all the same.
    """
    if single_process():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def gather_from_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in the order of the ranks."""
    if single_process():
        return [value]
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group)
    return cast(list[T], gathered)


def run_on_all_ranks(
    function: Callable[[int], T], what: str, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Runs a function on every rank and gathers the results; an error on one rank is raised on all.

    Args:
        function: called with this process's rank, 0 without a process group.
        what: what it does, for the error message: "load the model".
        group: of all ranks; None: the default one.

    Raises:
        Exception: on the ranks on which the function failed, its own error.
        InputError: on the other ranks.
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
    return [cast(T, each) for each, _ in gathered]


def assert_equal_across_ranks(parts: dict[str, Any]) -> None:
    """Raises InputError on every rank if `parts` differ between ranks.

    Each rank computes the order of the data by itself. If the machines read different copies of the
    data, samples would be repeated or never seen, without any error.
    """
    gathered = gather_from_ranks(parts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(
                    f"rank {rank} would train on other data than rank 0: its {name} is {other[name]}, "
                    f"rank 0's {value}; every machine must see the same shards in [data] path"
                )


def batch_group(dims: ParallelDims) -> dist.ProcessGroup | None:
    """The ranks that have different samples; None for one."""
    return dims.get_mesh("batch").get_group() if dims.dp_enabled else None


def loss_group(dims: ParallelDims) -> dist.ProcessGroup | None:
    """The ranks that a step's loss is a sum over; None for one."""
    return dims.get_mesh("loss").get_group() if dims.dp_cp_enabled else None


def all_ranks(dims: ParallelDims) -> dist.ProcessGroup | None:
    """Those of every kind of parallelism; None for one."""
    return dist.group.WORLD if dims.world_size > 1 else None


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The value, with its sum in it. It stays on the device: the host does not wait for it."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
