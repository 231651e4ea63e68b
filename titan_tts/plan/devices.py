"""GPUs that a plan can be made for, and what connects them, from NVIDIA's datasheets.

The dense bf16 peaks come from `metrics`, which divides by them for MFU.
"""

from dataclasses import dataclass

from titan_tts.plan import measured
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.metrics import peak_flops

_GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU: the GiB that a process can have (the datasheet's decimal GB less what driver and ECC take), bytes/s of
    its memory and of the link to each other GPU of a node in one direction (PCIe's where bridges are faster)."""

    name: str
    """as `--gpu` names it; the driver's name of the device has all of its words"""

    memory_gib: float
    bandwidth: float
    link: float
    fp8: bool = True
    gpus_per_node: int = 8
    peak_tflops: float = 0.0
    """dense bf16 as [metrics] peak_tflops gives it; 0: by name"""

    @property
    def peak_flops(self) -> float:
        """Dense bf16, FLOP/s."""
        peak = peak_flops(self.name, self.peak_tflops)
        assert peak is not None, f"{self.name} has no peak in metrics"
        return peak

    @property
    def capacity(self) -> int:
        """Maximum bytes of allocations."""
        usable = self.memory_gib * 2**30 * (1 - measured.FRAGMENTED_FRACTION)
        return int(usable) - measured.CONTEXT_BYTES


# The usable GiB are as seen on an H200 and else guesses.
DEVICES = (
    Device("A100", 79.0, 2039 * _GB, 300 * _GB, fp8=False),
    Device("A100 40GB", 39.0, 1555 * _GB, 300 * _GB, fp8=False),
    Device("H100 NVL", 93.0, 3900 * _GB, 64 * _GB),
    Device("H100 PCIe", 79.0, 2000 * _GB, 64 * _GB),
    Device("H100", 79.0, 3350 * _GB, 450 * _GB),
    Device("GH200", 95.0, 4000 * _GB, 450 * _GB, gpus_per_node=4),
    Device("H200", 139.0, 4800 * _GB, 450 * _GB),
    Device("H200 NVL", 139.0, 4800 * _GB, 64 * _GB),
    Device("B200", 178.0, 8000 * _GB, 900 * _GB),
    Device("L40S", 44.0, 864 * _GB, 32 * _GB),
)

ACCELERATOR = "cuda"
"""torch's name for the kind of device that all of them are"""

INTER_NODE_BYTES_PER_GPU = 50 * _GB
"""between nodes, bytes/s in one direction for each GPU of a node: one 400 Gbit/s port per GPU, a guess
that `--inter-node-gbps` replaces"""

_VARIANTS = {"pcie", "nvl", "40gb", "64gb", "96gb", "144g", "144gb", "mig"}
"""words in a driver's name that mean another memory, other links or a slice"""


def find_device(name: str) -> Device:
    """The device with this name in the table. Raises InputError where there is none."""
    for device in DEVICES:
        if device.name.lower() == name.lower():
            return device
    raise InputError(
        f"--gpu {name!r}, but allowed are {', '.join(device.name for device in DEVICES)}"
    )


def device_of(reported: str) -> Device | None:
    """The device that a driver reports as, for example, "NVIDIA H100 80GB HBM3"; None if not known."""
    # A GH200 is no H200, and an H100 NVL or a slice of an H100 (MIG) is no H100: whole words only.
    words = set(reported.lower().replace("-", " ").split())
    for device in DEVICES:
        own = set(device.name.lower().split())
        if own <= words and own & _VARIANTS == words & _VARIANTS:
            return device
    return None


def check_device(config: JobConfig, device: Device) -> None:
    """Raises InputError for what a device cannot train, or what has no forecast."""
    precision = config.training.mixed_precision_param
    require(
        precision == "bfloat16",
        f"[training] mixed_precision_param = {precision!r}, but only 'bfloat16' is planned",
    )
    require(
        device.fp8 or not runs_fp8(config),
        f"[model] converters = ['float8'], but the {device.name} has no fp8; remove it",
    )


def runs_fp8(config: JobConfig) -> bool:
    """Returns whether the blocks' matmuls run in 8 bits, not emulated."""
    return bool(config.model.converters) and not config.quantize.linear.float8.emulate


@dataclass(frozen=True)
class Cluster:
    """GPUs of a run and their links."""

    device: Device
    gpus_per_node: int
    nodes: int
    inter_node_gbps: float = 0.0
    """GB/s between one node and the others, in one direction; 0: `INTER_NODE_BYTES_PER_GPU`"""

    @classmethod
    def of(cls, device: Device, gpus: int, gpus_per_node: int = 0, gbps: float = 0.0) -> "Cluster":
        """Whole nodes, or a part of one. `gpus_per_node`: 0: as usual for the device."""
        in_node = min(gpus, gpus_per_node or device.gpus_per_node)
        if gpus < 1 or gpus % in_node:
            raise InputError(
                f"--gpus {gpus} must be whole nodes of {in_node} {device.name}, or less than one; give a "
                f"multiple of {in_node}, or other nodes by --gpus-per-node"
            )
        return cls(device, in_node, gpus // in_node, gbps)

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def inter_node(self) -> float:
        """Bytes/s in one direction, of all GPUs of a node together."""
        return self.inter_node_gbps * _GB or self.gpus_per_node * INTER_NODE_BYTES_PER_GPU
