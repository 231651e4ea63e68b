"""Choices of layout, activation checkpointing, compilation and micro-batch, ranked by predicted speed.

Every choice keeps the config's global batch, so all train the same; the config's own is among them.
Those that do not fit come after the others, those that training would refuse come last with its
sentence, and none is left out.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.factors import checkpointing_name
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.plan.compiled_block import with_blocks
from torchtitan.models.dit_tts.plan.devices import ACCELERATOR, Cluster, check_device
from torchtitan.models.dit_tts.plan.memory import capacity, states_total
from torchtitan.models.dit_tts.plan.plan import Planner, estimated_buckets, layout_of
from torchtitan.models.dit_tts.plan.predictions import Step
from torchtitan.models.dit_tts.plan.states import DataParallelLayout
from torchtitan.models.dit_tts.plan.step_time import Factor

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
    """whether it is the config's"""

    refused: str
    """the sentence that training would end with; empty where it starts"""

    states: int
    """bytes of a GPU without any batch"""

    capacity: int
    max_bytes: int
    """in the bucket that needs the most; the states where not even these fit"""

    fits: bool
    step: Step | None
    """in the longest bucket; None where it is refused or not even the states fit"""


def grid(config: JobConfig, cluster: Cluster, factor: Factor) -> list[Choice]:
    """All choices, the fastest that fits first."""
    check_device(config, cluster.device)
    planner = Planner(config, cluster.gpus)
    config = planner.config
    own_options = config.activation_checkpoint
    own = (
        layout_of(config, cluster.gpus),
        own_options,
        blocks_compiled(config),
        config.training.local_batch_size,
    )
    checkpointing = {checkpointing_name(asdict(own_options)): own_options}
    mode: Any
    for mode, option in _CHECKPOINTING:
        other = replace(own_options, mode=mode, selective_ac_option=option)
        checkpointing.setdefault(checkpointing_name(asdict(other)), other)
    # DDP, FSDP2 and HSDP; on one GPU or one node some of them are the same.
    ranks, tensor = planner.ranks, own[0].tensor
    shards = (1, ranks, max(1, cluster.gpus_per_node // tensor))
    others = [DataParallelLayout(ranks // each, each, tensor) for each in shards]
    layouts = dict.fromkeys([own[0], *others])
    choices = []
    for layout, options, compiled, (samples, accumulation) in itertools.product(
        layouts,
        checkpointing.values(),
        (True, False),
        _micro_batches(config, ranks),
    ):
        parallelism = replace(
            config.parallelism,
            data_parallel_replicate_degree=layout.replicas,
            data_parallel_shard_degree=layout.shards,
        )
        each = replace(
            with_blocks(config, compiled),
            parallelism=parallelism,
            activation_checkpoint=options,
            training=replace(
                config.training,
                local_batch_size=samples,
                global_batch_size=samples * accumulation * ranks,
            ),
        )
        is_own = (layout, options, compiled, samples) == own
        choices.append(_choice(planner, each, cluster, factor, accumulation, own=is_own))
    return sorted(choices, key=_rank)


def _choice(
    planner: Planner,
    config: JobConfig,
    cluster: Cluster,
    factor: Factor,
    accumulation: int,
    *,
    own: bool,
) -> Choice:
    samples = config.training.local_batch_size
    states = max_bytes = states_total(planner.states(config))
    room = capacity(cluster.device)
    refused, step = "", None
    try:
        validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
    except InputError as error:
        refused = str(error)
    if not refused and states <= room:
        longest = replace(planner.longest, micro_batch=samples, accumulation=accumulation)
        step = planner.step(config, cluster, factor, longest)
        needs = [
            planner.memory(config, cluster.device, batches).total
            for _, batches in estimated_buckets(config, planner.ranks)
        ]
        max_bytes = max(step.memory.total, *needs)
    return Choice(
        layout=layout_of(config, cluster.gpus),
        checkpointing=checkpointing_name(asdict(config.activation_checkpoint)),
        compiled=blocks_compiled(config),
        micro_batch=samples,
        accumulation=accumulation,
        own=own,
        refused=refused,
        states=states,
        capacity=room,
        max_bytes=max_bytes,
        fits=step is not None and max_bytes <= room,
        step=step,
    )


def _rank(choice: Choice) -> tuple[bool, bool, bool, float]:
    step = choice.step
    speed = step.samples_per_second.middle if step is not None else 0.0
    return bool(choice.refused), not choice.fits, step is None, -speed


def _micro_batches(config: JobConfig, ranks: int) -> Iterator[tuple[int, int]]:
    """(samples, accumulation steps) with the config's global batch: powers of two, all of it and the
    config's own."""
    samples = batch_split(config.training, ranks)[0] // ranks
    powers = {2**power for power in range(samples.bit_length())}
    for each in sorted(powers | {samples, config.training.local_batch_size}):
        if samples % each == 0:
            yield each, samples // each
