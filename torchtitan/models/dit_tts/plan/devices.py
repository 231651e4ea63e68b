"""GPUs that a plan can be made for: what their datasheets say of rate, memory and links.

Rates here are the vendors' peaks; what a run reaches of them is in `constants`. The dense bf16 peaks
are those of `metrics`, which divides by them for MFU.
"""

from dataclasses import dataclass, replace

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.metrics import peak_flops

_GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU."""

    name: str
    """as `--gpu` names it; the driver's name of the device has all of its words"""

    memory_gib: float
    """what a process can have, in GiB: the datasheet's decimal GB less what driver and ECC take"""

    bandwidth: float
    """of its memory, bytes/s"""

    link: float
    """to each other GPU of the node, bytes/s in one direction"""

    fp8: bool
    """tensor cores multiply 8-bit floats, at twice the bf16 rate"""

    source: str
    """where the figures are from, and which of them are guesses"""

    peak_tflops: float = 0.0
    """dense bf16 as [metrics] peak_tflops gives it; 0: by name"""

    @property
    def peak_flops(self) -> float:
        """Dense bf16, FLOP/s."""
        peak = peak_flops(self.name, self.peak_tflops)
        assert peak is not None, f"{self.name} has no peak in metrics"
        return peak


DEVICES = (
    Device(
        "A100",
        79.0,
        2039 * _GB,
        300 * _GB,
        False,
        "NVIDIA A100 80GB SXM datasheet: 80 GB, 2039 GB/s, NVLink 600 GB/s both ways; usable GiB a guess",
    ),
    Device(
        "A100 40GB",
        39.0,
        1555 * _GB,
        300 * _GB,
        False,
        "NVIDIA A100 40GB SXM datasheet: 40 GB, 1555 GB/s, NVLink 600 GB/s both ways; usable GiB a guess",
    ),
    Device(
        "H100 NVL",
        93.0,
        3900 * _GB,
        64 * _GB,
        True,
        "NVIDIA H100 NVL datasheet: 94 GB, 3.9 TB/s, PCIe 5 128 GB/s both ways (bridged pairs are faster); "
        "usable GiB a guess",
    ),
    Device(
        "H100 PCIe",
        79.0,
        2000 * _GB,
        64 * _GB,
        True,
        "NVIDIA H100 datasheet: 80 GB, 2 TB/s, PCIe 5 128 GB/s both ways (bridged pairs are faster); "
        "usable GiB a guess",
    ),
    Device(
        "H100",
        79.0,
        3350 * _GB,
        450 * _GB,
        True,
        "NVIDIA H100 SXM datasheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways; usable GiB a guess",
    ),
    Device(
        "GH200",
        95.0,
        4000 * _GB,
        450 * _GB,
        True,
        "NVIDIA GH200 datasheet, the model with 96 GB of HBM3: 4 TB/s, NVLink 900 GB/s both ways; usable "
        "GiB a guess",
    ),
    Device(
        "H200",
        139.0,
        4800 * _GB,
        450 * _GB,
        True,
        "NVIDIA H200 SXM datasheet: 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways; usable GiB as seen on "
        "one",
    ),
    Device(
        "H200 NVL",
        139.0,
        4800 * _GB,
        64 * _GB,
        True,
        "NVIDIA H200 NVL datasheet: 141 GB, 4.8 TB/s, PCIe 5 128 GB/s both ways (bridged GPUs are faster); "
        "usable GiB a guess",
    ),
    Device(
        "B200",
        178.0,
        8000 * _GB,
        900 * _GB,
        True,
        "NVIDIA HGX B200 datasheet: 180 GB, 8 TB/s, NVLink 1.8 TB/s both ways; usable GiB a guess",
    ),
    Device(
        "L40S",
        44.0,
        864 * _GB,
        32 * _GB,
        True,
        "NVIDIA L40S datasheet: 48 GB, 864 GB/s, PCIe 4 64 GB/s both ways; usable GiB a guess",
    ),
)

ACCELERATOR = "cuda"
"""torch's name of the kind of device that all of them are"""

INTER_NODE_BYTES_PER_GPU = 50 * _GB
"""between nodes, bytes/s in one direction for each GPU of a node: one 400 Gbit/s port a GPU, a guess
that `--inter-node-gbps` replaces"""


_VARIANTS = {"pcie", "nvl", "40gb", "64gb", "96gb", "144g", "144gb", "mig"}
"""words of a driver's name that tell another memory, other links or a slice"""


def find_device(name: str) -> Device:
    """By the name that the command line has.

    Raises:
        InputError: a GPU that the table does not have.
    """
    for device in DEVICES:
        if device.name.lower() == name.lower():
            return device
    raise InputError(
        f"--gpu {name!r} is not known; allowed are {', '.join(device.name for device in DEVICES)}"
    )


def device_of(reported: str) -> Device | None:
    """By the name that the driver reports, such as "NVIDIA H100 80GB HBM3"; None where it is not known."""
    # A GH200 is no H200, and an H100 NVL or a slice of an H100 (MIG) is no H100: whole words only.
    words = set(reported.lower().replace("-", " ").split())
    for device in DEVICES:
        own = set(device.name.lower().split())
        if own <= words and own & _VARIANTS == words & _VARIANTS:
            return device
    return None


def check_device(config: JobConfig, device: Device) -> None:
    """Raises InputError for what a device cannot train, or what nothing is known of."""
    precision = config.training.mixed_precision_param
    if precision != "bfloat16":
        raise InputError(
            f"[training] mixed_precision_param = {precision!r}: plans know the devices' rates in bfloat16 "
            f"alone; set it to 'bfloat16'"
        )
    if runs_fp8(config) and not device.fp8:
        raise InputError(
            f"[model] converters = ['float8'] needs a GPU with fp8, and the {device.name} has none; take it "
            f"out, or plan for another GPU"
        )


def runs_fp8(config: JobConfig) -> bool:
    """Whether the blocks' products run in 8 bits, not emulated."""
    return bool(config.model.converters) and not config.quantize.linear.float8.emulate


def with_peak(device: Device, config: JobConfig) -> Device:
    """The device with the peak that the config gives it, if it gives one."""
    return replace(device, peak_tflops=config.metrics.peak_tflops)


@dataclass(frozen=True)
class Cluster:
    """GPUs of a run and how they are joined."""

    device: Device
    gpus_per_node: int
    nodes: int
    inter_node: float
    """bytes/s in one direction, of a whole node"""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


def cluster_of(
    device: Device, gpus: int, gpus_per_node: int, inter_node: float | None = None
) -> Cluster:
    """inter_node: bytes/s of a whole node in one direction.

    Raises:
        InputError: GPUs that do not make whole nodes.
    """
    if gpus % gpus_per_node:
        raise InputError(
            f"{gpus} GPUs are no whole number of nodes of {gpus_per_node}; change one of them"
        )
    nodes = gpus // gpus_per_node
    between = inter_node or gpus_per_node * INTER_NODE_BYTES_PER_GPU
    return Cluster(device, gpus_per_node, nodes, between)
