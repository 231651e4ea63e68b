"""Seconds of an optimizer step: each kind of work at the rate that it can reach, one after the other.

Products and attention run at a share of the tensor cores' peak, everything else at a share of the
memory's bandwidth, kernels have a gap between them, and collectives count as far as nothing hides
them. The shares are `constants`; the work is measured on tensors without data or counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.plan.communication import (
    BACKWARD,
    FORWARD,
    TEXT_ENCODER,
    Communication,
)
from torchtitan.models.dit_tts.plan.constants import NAMES, Constants
from torchtitan.models.dit_tts.plan.devices import Device
from torchtitan.models.dit_tts.plan.profile import Work
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, StateMemory

_DEVIATIONS = 2.0
"""of an error bar, to either side"""

_MOMENT_BYTES = {"float32": None, "bfloat16": 2, "8bit": 1}
_OPTIMIZER_KERNELS = 400
"""an optimizer step's, multi-tensor kernels of a few hundred parameters each; a guess"""


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step of one GPU does."""

    device: Device
    micro_batch: Work
    accumulation: int
    fp8: bool
    """the blocks' products run in 8 bits"""

    encoder_flops: float
    """of a frozen text encoder, a micro-batch"""

    copied_bytes: float
    """of weights and gradients that FSDP2 or `replicate` copies and casts, a micro-batch"""

    optimizer_bytes: float
    """clipping, optimizer and EMA"""

    communication: Communication
    model_flops: float
    """training FLOPs of the GPU's samples, without recomputation, and its text encoder's"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go."""

    parts: dict[str, float]
    computing: dict[str, float]
    """phase -> its computation, all micro-batches together"""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Interval:
    """A prediction with two standard deviations to either side."""

    low: float
    middle: float
    high: float


def step_time(work: StepWork, constants: Constants) -> StepTime:
    each = work.micro_batch
    gain = 1 + (1 / constants["fp8_gain"] - 1) * each.block_share if work.fp8 else 1.0
    products = each.product_seconds * gain / constants["gemm_efficiency"]
    attention = each.attention_seconds / constants["attention_efficiency"]
    moving = each.moving_seconds + each.fused_seconds * constants["fused_traffic"]
    moving = moving / constants["memory_efficiency"]
    gaps = each.kernels * constants["kernel_seconds"]
    forward, backward = work.accumulation * (products + attention + moving + gaps)

    bandwidth = work.device.bandwidth * constants["memory_efficiency"]
    encoder = work.encoder_flops / work.device.peak_flops / constants["gemm_efficiency"]
    encoder *= work.accumulation * constants["encoder_slowdown"]
    computing = {FORWARD: float(forward), BACKWARD: float(backward), TEXT_ENCODER: float(encoder)}
    exposed = work.communication.exposed(computing, constants)
    parts = {
        "products": work.accumulation * products.sum(),
        "attention": work.accumulation * attention.sum(),
        "pointwise": work.accumulation * moving.sum(),
        "gaps between kernels": work.accumulation * gaps.sum(),
        "text encoder": encoder,
        "copies of weights": work.accumulation * work.copied_bytes / bandwidth,
        "optimizer": work.optimizer_bytes / bandwidth
        + _OPTIMIZER_KERNELS * constants["kernel_seconds"],
        "exposed communication": exposed,
    }
    return StepTime({name: float(value) for name, value in parts.items()}, computing)


def log_slopes(seconds: Callable[[Constants], float], constants: Constants) -> np.ndarray:
    """(n,) derivatives of log seconds by the logarithms of the constants."""
    step = 1e-4
    return np.array(
        [
            np.log(seconds(constants.moved(i, step)) / seconds(constants.moved(i, -step)))
            / (2 * step)
            for i in range(len(NAMES))
        ]
    )


def with_error(seconds: Callable[[Constants], float], constants: Constants) -> Interval:
    """Seconds with the error bar that the constants' own errors and the unexplained one give."""
    slopes = log_slopes(seconds, constants)
    deviation = np.sqrt(slopes @ constants.covariance @ slopes + constants.unexplained**2)
    middle, factor = seconds(constants), float(np.exp(_DEVIATIONS * deviation))
    return Interval(middle / factor, middle, middle * factor)


def optimizer_bytes(config: JobConfig, states: StateMemory) -> float:
    """Read and written between the backward pass and the next forward one."""
    own = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    parameters = states.gradients / own
    moment = _MOMENT_BYTES[config.optimizer.state_dtype] or own
    clipping = 3 * own  # the norm, then each gradient scaled
    update = 3 * own + 2 * 2 * moment  # weight read and written, gradient read, two moments both
    ema = own + 2 * 4 if config.ema.enable else 0
    return parameters * (clipping + update + ema)


def copied_bytes(config: JobConfig, parameters: int, layout: DataParallelLayout) -> float:
    """Read and written beside the collectives, a micro-batch."""
    training = config.training
    own = TORCH_DTYPE_MAP[training.dtype].itemsize
    if layout.sharded:
        whole = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
        reduced = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize
        cast = (own + whole) / layout.shards
        gathered = 2 * whole  # out of the collective's buffer, read and written
        return parameters * (2 * (cast + gathered) + whole + reduced)
    if layout.replicas > 1:
        return (
            parameters * 4 * own
        )  # into the copy that `replicate` computes on, and gradients out of it
    return 0.0
