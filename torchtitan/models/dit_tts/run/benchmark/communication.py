"""Time of collectives, from steps that are profiled after the timed ones."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from torchtitan.models.dit_tts.config.job_config import JobConfig

_STEPS = 2


def profiled_steps(config: JobConfig) -> int:
    """Steps to profile: none on one rank, nor where [profiling] has the only profiler that can run."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    wanted = config.benchmark.profile and not config.profiling.enable_profiling
    return _STEPS if wanted and not alone else 0


def profiled() -> torch.profiler.profile:
    """A profiler of what the host does and, on a GPU, of its kernels."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def communication_seconds(events: Iterable[Any]) -> float:
    """Seconds in which a collective is under way: NCCL's kernels on a GPU, gloo's operations on a CPU,
    which run in threads of their own. Collectives that overlap count once."""
    total, until = 0.0, 0.0
    for begin, end in sorted(
        (event.time_range.start, event.time_range.end) for event in events if _is_collective(event)
    ):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total / 1e6


def _is_collective(event: Any) -> bool:
    if event.device_type == DeviceType.CPU:
        return event.name.startswith("gloo:")
    return "nccl" in event.name.lower()
