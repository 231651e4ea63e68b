"""Clocks, power and temperature of the GPU, five times a second, and what they were while an item was measured."""

import datetime
import statistics
import subprocess
from pathlib import Path

from tools.gpu_check.items import Values

_QUERIED = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
_NAMES = ("sm_mhz", "memory_mhz", "watts", "celsius")


def start(file: Path) -> subprocess.Popen:
    """nvidia-smi, which appends a line every 200 ms until it is killed."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={_QUERIED}"]
    command += ["--format=csv,noheader,nounits", "-lms", "200"]
    with file.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)


def between(file: Path, began: float, ended: float) -> Values:
    """Median, least and largest of each figure in this time; empty where there is no line."""
    chosen = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        moment, *figures = (part.strip() for part in line.split(","))
        try:
            time = datetime.datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            values = tuple(map(float, figures))
        except ValueError:  # the last line may be cut; "[N/A]" of a virtual device
            continue
        if began <= time <= ended and len(values) == len(_NAMES):
            chosen.append(values)
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in zip(_NAMES, zip(*chosen, strict=True), strict=False)
    }
