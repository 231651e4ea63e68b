"""What a GPU holds when it holds most, and how many samples that leaves room for."""

from dataclasses import dataclass

from torchtitan.models.dit_tts.plan.activations import ActivationMemory
from torchtitan.models.dit_tts.plan.devices import Device
from torchtitan.models.dit_tts.plan.profile import Profile, Shape
from torchtitan.models.dit_tts.plan.states import StateMemory

CONTEXT_BYTES = int(1.5 * 2**30)
"""the device's context, libraries' workspaces and buffers of collectives; a guess"""

FRAGMENTED_SHARE = 0.04
"""of a GPU's memory, that the allocator has reserved and cannot use; a guess"""

_MOST_SAMPLES = 4096


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one GPU."""

    states: int
    """weights, gradients, optimizer, EMA, a frozen encoder, and what is whole for a while"""

    activations: ActivationMemory
    capacity: int
    """what allocations may come to"""

    @property
    def total(self) -> int:
        each = self.activations
        return self.states + each.batch + each.saved + each.working

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def states_total(states: StateMemory) -> int:
    """Bytes on the GPU whatever the batch."""
    lasting = states.weights + states.gradients + states.optimizer + states.ema
    return (
        (0 if states.offloaded else lasting)
        + states.gathered.total
        + states.gradients_in_turn
        + states.encoder
        + (states.encoder_gathered.total if states.encoder_sharded else 0)
    )


def capacity(device: Device) -> int:
    """Bytes that allocations may come to."""
    return int(device.memory_gib * 2**30 * (1 - FRAGMENTED_SHARE)) - CONTEXT_BYTES


def memory_need(profile: Profile, states: StateMemory, device: Device, shape: Shape) -> MemoryNeed:
    return MemoryNeed(states_total(states), profile.memory(shape), capacity(device))


def largest_micro_batch(
    profile: Profile, states: StateMemory, device: Device, frames: int, text_tokens: int
) -> int:
    """Most samples that fit; 0 where not one does."""
    low, high = 0, _MOST_SAMPLES
    while low < high:
        samples = (low + high + 1) // 2
        shape = Shape(samples, frames, text_tokens)
        if memory_need(profile, states, device, shape).fits:
            low = samples
        else:
            high = samples - 1
    return low
