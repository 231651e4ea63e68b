"""Choices of layout, activation checkpointing, compile and micro-batch, ranked by predicted speed.

Every choice keeps the config's global batch, so all train the same. Those that do not fit are ranked
behind the others and never left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan.models.dit_tts.config import run_folder_path, upstream_view
from torchtitan.models.dit_tts.job_config import JobConfig
from torchtitan.models.dit_tts.planning.constants import Constants
from torchtitan.models.dit_tts.planning.devices import Cluster
from torchtitan.models.dit_tts.planning.forecast import Forecaster, StepForecast
from torchtitan.models.dit_tts.planning.memory import capacity, states_total
from torchtitan.models.dit_tts.planning.states import Layout

# Activation checkpointing: name, mode, option.
_CHECKPOINTING = (
    ("none", "none", "op"),
    ("op", "selective", "op"),
    ("every 2nd", "selective", "2"),
    ("full", "full", "op"),
)


@dataclass(frozen=True)
class Choice:
    layout: Layout
    checkpointing: str
    compiled: bool
    micro_batch: int
    accumulation: int
    states: int
    """bytes of a GPU without any batch"""

    capacity: int
    step: StepForecast | None
    """None where not even the states fit"""

    @property
    def fits(self) -> bool:
        return self.step is not None and self.step.memory.fits


def grid(config: JobConfig, cluster: Cluster, constants: Constants) -> list[Choice]:
    """All choices, the fastest that fits first."""
    config = upstream_view(config, run_folder_path(config), cluster.gpus)
    forecaster = Forecaster(config, cluster, constants, shorter=False)
    choices = []
    for layout in _layouts(cluster):
        states = states_total(forecaster.states(config, layout))
        most = capacity(cluster.device)
        for name, mode, option in _CHECKPOINTING:
            for compiled in (True, False):
                chosen = replace(
                    config,
                    compile=replace(config.compile, enable=compiled),
                    activation_checkpoint=replace(
                        config.activation_checkpoint, mode=mode, selective_ac_option=option
                    ),
                )
                for samples, accumulation in _micro_batches(config, cluster.gpus):
                    step = None
                    if states <= most:
                        step = forecaster.step(
                            chosen, layout, forecaster.lengths, samples, accumulation
                        )
                    choices.append(
                        Choice(layout, name, compiled, samples, accumulation, states, most, step)
                    )
    return sorted(choices, key=_rank)


def _rank(choice: Choice) -> tuple[bool, bool, float]:
    step = choice.step
    speed = step.samples_per_second.middle if step is not None else 0.0
    return not choice.fits, step is None, -speed


def _layouts(cluster: Cluster) -> Iterator[Layout]:
    gpus = cluster.gpus
    if gpus == 1:
        yield Layout(1, 1)
        return
    yield Layout(gpus, 1)
    yield Layout(1, gpus)
    if cluster.nodes > 1 and cluster.gpus_per_node > 1:
        yield Layout(cluster.nodes, cluster.gpus_per_node)


def _micro_batches(config: JobConfig, gpus: int) -> Iterator[tuple[int, int]]:
    """(samples, accumulation steps) that come to the global batch: powers of two, all of it and what
    the config has."""
    training = config.training
    samples = training.global_batch_size // gpus
    if training.global_batch_size < 0:
        samples = training.local_batch_size
    powers = {2**power for power in range(samples.bit_length())}
    for each in sorted(powers | {samples, training.local_batch_size}):
        if each and samples % each == 0:
            yield each, samples // each
