"""Makes the CPU a device that TorchTitan can train on when the machine has no accelerator.

Upstream falls back to "cuda" on such a machine and then fails. Its choice lives in two module
variables, `torchtitan.tools.utils.device_type` and `device_module`, which other modules copy when
they are imported; they are therefore set right after that module is loaded. torch is imported no
sooner, so that commands which compute nothing start at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_UTILS = "torchtitan.tools.utils"

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


def use_cpu_without_accelerator() -> None:
    """Points TorchTitan at the CPU if torch sees no accelerator; otherwise does nothing.

    It takes effect when upstream's module that chooses the device is imported.
    """
    if _UTILS in sys.modules:
        _choose_device(sys.modules[_UTILS])
    elif not any(isinstance(finder, _UtilsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _UtilsFinder())


class _UtilsFinder(MetaPathFinder):
    """Finds upstream's module where it is, and sets the device once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _UTILS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_choose(module: ModuleType) -> None:
            execute(module)
            _choose_device(module)

        spec.loader.exec_module = execute_and_choose  # type: ignore[method-assign]
        return spec


def _choose_device(utils: Any) -> None:
    from torch._utils import _get_available_device_type

    if _get_available_device_type() is not None:
        return
    utils.device_type = "cpu"
    utils.device_module = CPUDeviceModule
    # Upstream takes an unknown device for an A100. A CPU has no datasheet peak to divide by.
    utils.get_peak_flops = lambda device_name: float("nan")
