"""Clocks, power and temperature of the GPU, five times a second, and what they were while an item was measured."""

import datetime
import statistics
import subprocess
from pathlib import Path

from tools.gpu_check.items import Values

_QUERIED = ("timestamp", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_NAMES = ("sm_mhz", "memory_mhz", "watts", "celsius")


def start(file: Path) -> subprocess.Popen | None:
    """nvidia-smi, which appends a line every 200 ms until it is killed; None where there is none."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(_QUERIED)}"]
    command += ["--format=csv,noheader,nounits", "-lms", "200"]
    try:
        with file.open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def read(file: Path) -> list[tuple[float, ...]]:
    """(time.time(), MHz of the multiprocessors, MHz of the memory, W, °C) of each complete line."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        parts = [part.strip() for part in line.split(",")]
        try:
            moment = datetime.datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            found.append((moment, *map(float, parts[1 : len(_QUERIED)])))
        except (ValueError, IndexError):  # the last line may be cut; "[N/A]" of a virtual device
            continue
    return [each for each in found if len(each) == len(_QUERIED)]


def between(lines: list[tuple[float, ...]], began: float, ended: float) -> Values:
    """Median, least and largest of each figure in this time; empty where there is no line."""
    chosen = [line[1:] for line in lines if began <= line[0] <= ended]
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in zip(_NAMES, zip(*chosen, strict=True), strict=False)
    }
