"""Choices of layout, activation checkpointing, compile and micro-batch, ranked by predicted speed.

Every choice keeps the config's global batch, so all train the same; the config's own is among them.
Those that do not fit are ranked behind the others, those that training would refuse stand last with its
sentence, and none is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.plan.buckets import estimated_buckets
from torchtitan.models.dit_tts.plan.compiled_block import blocks_compiled, with_blocks
from torchtitan.models.dit_tts.plan.constants import Constants
from torchtitan.models.dit_tts.plan.devices import ACCELERATOR, Cluster
from torchtitan.models.dit_tts.plan.forecast import Forecaster, StepForecast, layout_of
from torchtitan.models.dit_tts.plan.memory import capacity, states_total
from torchtitan.models.dit_tts.plan.states import DataParallelLayout

# Activation checkpointing: mode and option.
_CHECKPOINTING = (("none", "op"), ("selective", "op"), ("selective", "2"), ("full", "op"))


@dataclass(frozen=True)
class Choice:
    layout: DataParallelLayout
    checkpointing: str
    compiled: bool
    micro_batch: int
    """of the longest bucket"""

    accumulation: int
    own: bool
    """the config's"""

    refused: str
    """what training would say instead of starting; empty where it starts"""

    states: int
    """bytes of a GPU without any batch"""

    capacity: int
    most: int
    """bytes in the bucket that needs most; the states where not even these fit"""

    step: StepForecast | None
    """in the longest bucket; None where it is refused or not even the states fit"""

    @property
    def fits(self) -> bool:
        return self.step is not None and self.most <= self.capacity


def checkpointing_name(options: ActivationCheckpoint) -> str:
    """Activation checkpointing in a word or two."""
    if options.mode == "memory_budget":
        return f"memory_budget {options.memory_budget:g}"
    if options.mode != "selective":
        return options.mode
    return "op" if options.selective_ac_option == "op" else f"every {options.selective_ac_option}"


def grid(config: JobConfig, cluster: Cluster, constants: Constants) -> list[Choice]:
    """All choices, the fastest that fits first."""
    own_layout = layout_of(config, cluster.gpus)
    config = upstream_view(config, run_folder_path(config), cluster.gpus)
    forecaster = Forecaster(config, cluster, constants, shorter=True)
    own = own_layout, config.activation_checkpoint, blocks_compiled(config)
    layouts = dict.fromkeys([own_layout, *_layouts(cluster)])
    checkpointing = [own[1]]
    for mode, option in _CHECKPOINTING:
        other = replace(own[1], mode=mode, selective_ac_option=option)
        if checkpointing_name(other) != checkpointing_name(own[1]):
            checkpointing.append(other)
    choices = []
    for layout in layouts:
        for options in checkpointing:
            for compiled in (True, False):
                chosen = with_blocks(_with_layout(config, layout), compiled)
                chosen = replace(chosen, activation_checkpoint=options)
                for samples, accumulation in _micro_batches(config, cluster.gpus):
                    training = replace(config.training, local_batch_size=samples)
                    is_own = (layout, options, compiled) == own
                    is_own = is_own and samples == config.training.local_batch_size
                    each = replace(chosen, training=training)
                    choices.append(_choice(forecaster, each, layout, accumulation, is_own))
    return sorted(choices, key=_rank)


def _choice(
    forecaster: Forecaster,
    config: JobConfig,
    layout: DataParallelLayout,
    accumulation: int,
    own: bool,
) -> Choice:
    cluster, samples = forecaster.cluster, config.training.local_batch_size
    states = most = states_total(forecaster.states(config, layout))
    room = capacity(cluster.device)
    refused, step = "", None
    try:
        validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
    except InputError as error:
        refused = str(error)
    if not refused and states <= room:
        step = forecaster.step(config, layout, forecaster.lengths, samples, accumulation)
        needs = [
            forecaster.memory(config, layout, bucket.lengths, bucket.micro_batch).total
            for bucket in estimated_buckets(config, cluster.gpus)
        ]
        most = max(step.memory.total, *needs)
    return Choice(
        layout=layout,
        checkpointing=checkpointing_name(config.activation_checkpoint),
        compiled=blocks_compiled(config),
        micro_batch=samples,
        accumulation=accumulation,
        own=own,
        refused=refused,
        states=states,
        capacity=room,
        most=most,
        step=step,
    )


def _rank(choice: Choice) -> tuple[bool, bool, bool, float]:
    step = choice.step
    speed = step.samples_per_second.middle if step is not None else 0.0
    return bool(choice.refused), not choice.fits, step is None, -speed


def _with_layout(config: JobConfig, layout: DataParallelLayout) -> JobConfig:
    parallelism = replace(
        config.parallelism,
        data_parallel_replicate_degree=layout.replicas,
        data_parallel_shard_degree=layout.shards,
    )
    return replace(config, parallelism=parallelism)


def _layouts(cluster: Cluster) -> Iterator[DataParallelLayout]:
    gpus = cluster.gpus
    if gpus == 1:
        yield DataParallelLayout(1, 1)
        return
    yield DataParallelLayout(gpus, 1)
    yield DataParallelLayout(1, gpus)
    if cluster.nodes > 1 and cluster.gpus_per_node > 1:
        yield DataParallelLayout(cluster.nodes, cluster.gpus_per_node)


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
