"""Bytes that data parallelism exchanges, how long that takes, and whether computation hides it.

Volumes are ring volumes: of W bytes among S ranks an all-gather or a reduce-scatter moves W (S - 1) / S
through each rank, an all-reduce twice that. Inside a node they pass the GPU's own link; between nodes
all groups of a node share the node's.
"""

from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.dit_tts.job_config import JobConfig
from torchtitan.models.dit_tts.planning.devices import Cluster
from torchtitan.models.dit_tts.planning.states import Layout, StateMemory

# The last part of the backward pass has nothing after it to hide behind.
_HIDING_SHARE_OF_BACKWARD = 0.9


@dataclass(frozen=True)
class Collective:
    """One kind of exchange in an optimizer step."""

    name: str
    volume: float
    """bytes through one rank a step"""

    seconds: float
    """at the links' full bandwidth, all of a step's together"""

    beside: str
    """"forward" or "backward": what can hide it"""

    first: float
    """seconds of the part that nothing hides: the first unit's or the last one's"""


@dataclass(frozen=True)
class Communication:
    collectives: tuple[Collective, ...]

    @property
    def volume(self) -> float:
        return sum(each.volume for each in self.collectives)

    def seconds(self, beside: str) -> float:
        return sum(each.seconds for each in self.collectives if each.beside == beside)

    def exposed(self, forward: float, backward: float, efficiency: float) -> float:
        """Seconds that computation does not hide.

        Args:
            forward, backward: seconds of computation in a step.
            efficiency: share of the links' bandwidth that is reached.
        """
        ends = sum(each.first for each in self.collectives) / efficiency
        over = max(0.0, self.seconds("forward") / efficiency - forward)
        over += max(
            0.0, self.seconds("backward") / efficiency - _HIDING_SHARE_OF_BACKWARD * backward
        )
        return ends + over

    def overlaps(self, forward: float, backward: float, efficiency: float) -> bool:
        """Whether all but the ends are hidden."""
        return (
            self.seconds("forward") / efficiency <= forward
            and self.seconds("backward") / efficiency <= _HIDING_SHARE_OF_BACKWARD * backward
        )


def communication(
    config: JobConfig,
    parameters: int,
    states: StateMemory,
    layout: Layout,
    cluster: Cluster,
    units: int,
    accumulation: int,
) -> Communication:
    """What one optimizer step exchanges.

    Args:
        parameters: trained ones.
        states: tells how many bytes of weights stay whole after their forward pass.
        layout: neighbouring ranks shard, as upstream's mesh has it.
        units: that are gathered and reduced one after another, about equally large.
        accumulation: micro-batches a step.
    """
    training = config.training
    whole = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize * parameters
    reduced = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize * parameters
    found = []

    def add(name: str, beside: str, size: float, ranks: int, in_node: int, times: int, rounds: int = 1):
        volume = rounds * size * (ranks - 1) / ranks
        once = rounds * _seconds(size, ranks, in_node, cluster)
        found.append(Collective(name, times * volume, times * once, beside, once / units))

    if layout.sharded:
        in_node = min(layout.shards, cluster.gpus_per_node)
        again = whole - states.gathered.kept
        add("all-gather, forward", "forward", whole, layout.shards, in_node, accumulation)
        add("all-gather, backward", "backward", again, layout.shards, in_node, accumulation)
        add("reduce-scatter", "backward", reduced, layout.shards, in_node, accumulation)
    if layout.replicas > 1:
        in_node = max(1, cluster.gpus_per_node // layout.shards)
        in_node = min(in_node, layout.replicas)
        # Replicas of shards reduce with every micro-batch's reduce-scatter, DDP once a step.
        times = accumulation if layout.sharded else 1
        kept = TORCH_DTYPE_MAP[training.dtype].itemsize * parameters
        size = reduced / layout.shards if layout.sharded else kept
        add("all-reduce", "backward", size, layout.replicas, in_node, times, rounds=2)
    return Communication(tuple(found))


def _seconds(size: float, ranks: int, in_node: int, cluster: Cluster) -> float:
    """Of an all-gather or reduce-scatter of `size` bytes at full bandwidth."""
    if ranks == 1:
        return 0.0
    nodes = -(-ranks // in_node)
    inside = size * (ranks - 1) / ranks / cluster.device.link if in_node > 1 else 0.0
    groups = max(1, cluster.gpus_per_node // in_node)
    between = groups * size * (nodes - 1) / nodes / cluster.inter_node
    return max(inside, between)
