"""Makes the CPU a device that TorchTitan can train on when the machine has no accelerator.

Upstream falls back to "cuda" on such a machine and then fails. Its choice lives in two module
variables, `torchtitan.tools.utils.device_type` and `device_module`, which other modules copy when
they are imported; `_imports.py` therefore has them set right after that module is loaded. torch is
imported no sooner, so that commands which compute nothing start at once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_STATUS = "/proc/self/status"
_CLEAR_REFS = "/proc/self/clear_refs"


@dataclass(frozen=True)
class CPUProperties:
    """The part of `torch.cuda.get_device_properties` that upstream reads."""

    total_memory: int
    """bytes of physical memory"""


class CPUDeviceModule:
    """The functions of `torch.cuda` that TorchTitan calls, for the CPU.

    "Device memory" is the resident set of this process.
    """

    @staticmethod
    def set_device(device: torch.device | str | int) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def synchronize(device: torch.device | None = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass

    @staticmethod
    def get_device_name(device: torch.device | None = None) -> str:
        try:
            with open("/proc/cpuinfo") as cpuinfo:
                names = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read(), re.M)
        except OSError:
            names = None
        return f"CPU {names.group(1).strip()}" if names else "CPU"

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> CPUProperties:
        return CPUProperties(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def reset_peak_memory_stats(device: torch.device | None = None) -> None:
        try:
            with open(_CLEAR_REFS, "w") as clear_refs:
                clear_refs.write("5")  # resets VmHWM, see proc(5)
        except OSError:
            pass  # not Linux, or /proc is read-only: the peak is then that since the process began

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        try:
            with open(_STATUS) as status:
                peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read(), re.M)
        except OSError:
            peak = None
        if peak is None:
            return {}
        peak_bytes = int(peak.group(1)) * 1024
        return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}


def use_cpu_without_accelerator(utils: Any) -> None:
    """Points TorchTitan at the CPU if torch sees no accelerator but Apple's MPS; otherwise does nothing. `utils`:
    `torchtitan.tools.utils`.
    """
    from torch._utils import _get_available_device_type

    # torch.mps lacks what TorchTitan asks of a device, such as its name, and MPS lacks float64.
    if _get_available_device_type() not in (None, "mps"):
        return
    utils.device_type = "cpu"
    utils.device_module = CPUDeviceModule
    # Upstream takes an unknown device for an A100. A CPU has no datasheet peak to divide by.
    utils.get_peak_flops = lambda device_name: float("nan")
