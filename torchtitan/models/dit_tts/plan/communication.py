"""Bytes that data parallelism exchanges, how long that takes, and whether computation hides it.

Volumes are those of flat rings, an assumption: of W bytes among S ranks an all-gather or a
reduce-scatter moves W (S - 1) / S through each rank in S - 1 steps, an all-reduce twice that. Inside a
node they pass the GPU's own link; between nodes all groups of a node share the node's. Collectives of
one phase share these two links and are otherwise side by side, as FSDP2's streams are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.plan.constants import Constants
from torchtitan.models.dit_tts.plan.devices import Cluster
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, StateMemory

FORWARD, BACKWARD, TEXT_ENCODER = "forward", "backward", "text encoder"
"""phases of a step whose computation can hide an exchange"""

# The last part of the backward pass has nothing after it to hide behind.
_HIDING_SHARE = {FORWARD: 1.0, BACKWARD: 0.9, TEXT_ENCODER: 1.0}


@dataclass(frozen=True)
class Collective:
    """One kind of exchange in an optimizer step."""

    name: str
    volume: float
    """bytes through one rank a step"""

    link_seconds: float
    """a step's, on the links inside nodes at full bandwidth"""

    network_seconds: float
    """a step's, on the links between nodes at full bandwidth"""

    ring_steps: int
    """a step's, one after another"""

    beside: str
    """the phase that can hide it"""

    units: int
    """gathered or reduced one after another; a micro-batch waits for the first or the last one"""

    @property
    def seconds(self) -> float:
        """At full bandwidth: both kinds of links are busy at once."""
        return max(self.link_seconds, self.network_seconds)

    def alone(self, constants: Constants) -> float:
        """Seconds of a step's, with nothing else on the links."""
        return (
            self.seconds / constants["network_efficiency"]
            + self.ring_steps * constants["ring_step_seconds"]
        )


@dataclass(frozen=True)
class Communication:
    collectives: tuple[Collective, ...]

    @property
    def volume(self) -> float:
        return sum(each.volume for each in self.collectives)

    def busy(self, phase: str, constants: Constants) -> float:
        """Seconds of all exchanges of a phase: the busier link's, or the longest stream's."""
        found = [each for each in self.collectives if each.beside == phase]
        if not found:
            return 0.0
        efficiency = constants["network_efficiency"]
        return max(
            sum(each.link_seconds for each in found) / efficiency,
            sum(each.network_seconds for each in found) / efficiency,
            max(each.alone(constants) for each in found),
        )

    def _uncovered(self, computing: Mapping[str, float], constants: Constants) -> float:
        return sum(
            max(0.0, self.busy(phase, constants) - _HIDING_SHARE[phase] * seconds)
            for phase, seconds in computing.items()
        )

    def exposed(self, computing: Mapping[str, float], constants: Constants) -> float:
        """Seconds that computation does not hide; computing: phase -> its seconds in a step."""
        ends = sum(each.alone(constants) / each.units for each in self.collectives)
        return ends + self._uncovered(computing, constants)

    def overlaps(self, computing: Mapping[str, float], constants: Constants) -> bool:
        """Whether all but the ends are hidden."""
        return self._uncovered(computing, constants) == 0.0


def communication(
    config: JobConfig,
    parameters: int,
    states: StateMemory,
    layout: DataParallelLayout,
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
    shards, in_node = layout.shards, min(layout.shards, cluster.gpus_per_node)
    found = []

    def add(
        name: str,
        beside: str,
        size: float,
        ranks: int,
        in_node: int,
        times: int,
        units: int = units,
        rounds: int = 1,
    ) -> None:
        moved = times * rounds * size * (ranks - 1) / ranks
        groups = max(1, cluster.gpus_per_node // in_node)
        found.append(
            Collective(
                name=name,
                volume=moved,
                link_seconds=moved / cluster.device.link if in_node > 1 else 0.0,
                network_seconds=groups * moved / cluster.inter_node if ranks > in_node else 0.0,
                ring_steps=times * rounds * units * (ranks - 1),
                beside=beside,
                units=units,
            )
        )

    if states.encoder_sharded:
        # A frozen encoder has no backward pass and keeps nothing whole between micro-batches.
        add(
            "all-gather, text encoder",
            TEXT_ENCODER,
            shards * states.encoder,
            shards,
            in_node,
            accumulation,
            states.encoder_units,
        )
    if layout.sharded:
        again = whole - states.gathered.kept
        add("all-gather, forward", FORWARD, whole, shards, in_node, accumulation)
        add("all-gather, backward", BACKWARD, again, shards, in_node, accumulation)
        add("reduce-scatter", BACKWARD, reduced, shards, in_node, accumulation)
    if layout.replicas > 1:
        in_node = min(max(1, cluster.gpus_per_node // shards), layout.replicas)
        kept = TORCH_DTYPE_MAP[training.dtype].itemsize * parameters
        size = reduced / shards if layout.sharded else kept
        add("all-reduce", BACKWARD, size, layout.replicas, in_node, times=1, rounds=2)
    return Communication(tuple(found))
