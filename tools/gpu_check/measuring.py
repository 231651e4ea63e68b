"""Times work on the device: warmed up, repeated, with its spread."""

import time
from collections.abc import Callable

import torch

from tools.gpu_check.items import Values
from torchtitan.models.dit_tts.run.benchmark.figures import spread

GIB = 2**30
_LEAST_REPEATS = 5


def timed(
    work: Callable[[], object],
    device: str,
    seconds: float = 0.5,
    warm_up: int = 3,
    least: int = _LEAST_REPEATS,
) -> Values:
    """Milliseconds of one call: median, p10, p90, least and most.

    Args:
        work: what is timed; its result is dropped.
        seconds: about how long it is repeated, at least `least` times.
    """
    for _ in range(warm_up):
        work()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        times.append(_once_ms(work, device))
    return {**{f"ms_{name}": value for name, value in spread(times).items()}, "repeats": len(times)}


def _once_ms(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def kernels(work: Callable[[], object]) -> list[tuple[str, float]]:
    """Names of a GPU's kernels and milliseconds of each in one call of `work`, the longest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_LEAST_REPEATS):
            work()
        torch.cuda.synchronize()
    found = [
        (event.key[:120], event.self_device_time_total / 1e3 / _LEAST_REPEATS)
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda each: -each[1])


def tflops(flops: float, milliseconds: float) -> float:
    return flops / milliseconds / 1e9


def peak_gib(work: Callable[[], object], device: str) -> float | None:
    """Most that `work` has allocated at once beyond what was there before; None on a CPU, where the
    allocator keeps no such count."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB
