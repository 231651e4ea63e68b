"""Profiling of work on the device: kernels by name and by group, its idle time, and the time of the host."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.gpu_check.items import Values

_GROUPS = {
    "attention": r"flash|fmha|sdpa|attention",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|scaled_mm|\bmm\b|addmm|bmm",
    "triton": r"^triton_",
    "optimizer": r"multi_tensor|adam|foreach|lpnorm",
    "copies": r"memcpy|memset|copy",
}


def group_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((group for group, names in _GROUPS.items() if re.search(names, lower)), "other")


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def profiled(work: Callable[[], object], device: str, repeats: int = 5) -> Values:
    """Profile one call of `work`, as the mean of `repeats` in a row.

    Returns:
        `ms_of_kernels`; `ms_by_group`; `kernels`, [name, milliseconds, calls], the longest first; `ms_of_device`, from the
        start of the first kernel to the end of the last, and `ms_idle` of it without a kernel; `ms_of_host` until the last
        launch; `ms_of_ranges` {range: [host, kernels launched in it]} of `record_function`. On a CPU operators stand for
        kernels.
    """
    on_device = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    synchronize(device)
    with profile(activities=list({ProfilerActivity.CPU, on_device})) as found:
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        host = time.perf_counter() - began
        synchronize(device)
    events = list(found.events())
    kind = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    kernels = [e for e in events if e.device_type == kind and not e.is_user_annotation]
    milliseconds, calls, groups = Counter[str](), Counter[str](), Counter[str]()
    for event in kernels:
        took = event.self_cpu_time_total if device == "cpu" else event.time_range.elapsed_us()
        milliseconds[event.name[:120]] += took / 1e3 / repeats
        calls[event.name[:120]] += 1
        groups[group_of(event.name)] += took / 1e3 / repeats
    whole, busy = covered((e.time_range.start / 1e3, e.time_range.end / 1e3) for e in kernels)
    return {
        "ms_of_kernels": groups.total(),
        "ms_of_device": whole / repeats,
        "ms_idle": (whole - busy) / repeats,
        "ms_of_host": host * 1e3 / repeats,
        "ms_by_group": dict(groups.most_common()),
        "ms_of_ranges": _ranges(events, repeats),
        "kernels": [[name, ms, calls[name] / repeats] for name, ms in milliseconds.most_common(40)],
    }


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Length from the first start to the last end, and the part of it that spans cover."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    busy, until = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return until - ordered[0][0], busy


def _ranges(events: Iterable[Any], repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for event in events:
        if event.is_user_annotation and event.device_type == DeviceType.CPU:
            sums = found.setdefault(event.name, [0.0, 0.0])
            sums[0] += event.cpu_time_total / 1e3 / repeats
            sums[1] += event.device_time_total / 1e3 / repeats
    return found


def tflops(flops: float, milliseconds: float) -> float:
    return flops / milliseconds / 1e9


def peak_gib(work: Callable[[], object], device: str) -> float:
    """The most that `work` allocates at once beyond what was there before; 0 on a CPU, which keeps no such count."""
    if device == "cpu":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
