"""What work costs on the device: kernels by name and by group, the time it idles, the time of the host, and clocks,
power and temperature meanwhile."""

import datetime
import math
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.gpu_check.supervisor import Values

_GROUPS = {
    "attention": r"flash|fmha|sdpa|attention",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|scaled_mm|\bmm\b|addmm|bmm",
    "triton": r"^triton_",
    "optimizer": r"multi_tensor|adam|foreach|lpnorm",
    "copies": r"memcpy|memset|copy",
}
_CLOCKS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz"}
_CLOCKS |= {"power.draw": "watts", "temperature.gpu": "celsius"}


def group_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((group for group, names in _GROUPS.items() if re.search(names, lower)), "other")


def profiled(work: Callable[[], object], device: str, repeats: int = 5) -> Values:
    """What the device did in one call of `work`, of `repeats` in a row; on a CPU operators stand for kernels.

    Returns: `kernels`, [name, milliseconds, calls], the longest first; `ms_of_device`, from the first kernel's begin to the
        last one's end, and `ms_idle` of it; `ms_of_host` until the last launch; `ms_of_ranges` {range: [host, kernels
        launched in it]} of `record_function`.
    """
    on_device = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    with profile(activities=list({ProfilerActivity.CPU, on_device})) as found:
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        host = time.perf_counter() - began
        wait()
    events = list(found.events())
    kind = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    kernels = [e for e in events if e.device_type == kind and not e.is_user_annotation]
    ranges: dict[str, list[float]] = {}
    for event in events:
        if event.is_user_annotation and event.device_type == DeviceType.CPU:
            took = event.cpu_time_total, event.device_time_total
            sums = ranges.get(event.name, [0.0, 0.0])
            ranges[event.name] = [x + y / 1e3 / repeats for x, y in zip(sums, took, strict=True)]
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
        "ms_of_ranges": ranges,
        "kernels": [[name, ms, calls[name] / repeats] for name, ms in milliseconds.most_common(40)],
    }


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Length from the first begin to the last end, and the part of it that spans cover."""
    ordered, busy, until = sorted(spans), 0.0, -math.inf
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return (until - ordered[0][0] if ordered else 0.0), busy


@contextmanager
def watched(file: Path) -> Iterator[None]:
    """nvidia-smi, where there is one, appends a line every 200 ms."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu=timestamp,{','.join(_CLOCKS)}"]
    command += ["--format=csv,noheader,nounits", "-lms", "200"]
    if not shutil.which("nvidia-smi"):
        yield
        return
    with file.open("wb") as out, subprocess.Popen(command, stdout=out) as watch:
        try:
            yield
        finally:
            watch.kill()


def clocks(file: Path, began: float, seconds: float) -> Values:
    """Median, least and largest of each figure in this time; empty where there is no line."""
    chosen = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        moment, *figures = line.split(",")
        with suppress(ValueError):  # the last line may be cut; "[N/A]" of a virtual device
            at = datetime.datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            values = list(map(float, figures))
            if began <= at <= began + seconds:
                chosen.append(values)
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in zip(_CLOCKS.values(), zip(*chosen), strict=False)
    }
