"""Everything that can be said of a run before it starts, from its config and a number of GPUs."""

from dataclasses import dataclass, replace

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.checks import data_parallel_degree, validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.plan.activations import ActivationMemory, activation_memory
from torchtitan.models.dit_tts.plan.arithmetic import StepArithmetic, step_arithmetic
from torchtitan.models.dit_tts.plan.downloads import Download, downloads
from torchtitan.models.dit_tts.plan.parameters import (
    ModelSizes,
    Part,
    build_on_meta,
    count_parameters,
    model_sizes,
)
from torchtitan.models.dit_tts.plan.states import DataParallelLayout, StateMemory, state_memory

_SHARDS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Plan:
    """A run that was not started."""

    config: JobConfig
    layout: DataParallelLayout
    sizes: ModelSizes
    parts: list[Part]
    states: StateMemory
    activations: ActivationMemory
    downloads: list[Download]
    step: StepArithmetic


def planned_gpus(config: JobConfig) -> tuple[int, str]:
    """(number of GPUs, why that many) where nobody has said it.

    Raises:
        InputError: no number that could be assumed fits the config.
    """
    parallelism = config.parallelism
    replicas, shards = (
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
    )
    if replicas >= 1 and shards >= 1:
        return replicas * shards, "the product of the degrees in [parallelism]"
    mistake: InputError | None = None
    for assumed in _SHARDS:
        gpus = max(1, replicas) * assumed
        try:
            validate_config(config, gpus, list(model_flavors()))
            return (
                gpus,
                "assumed; --dry-run-gpus N or, in scripts/train_tts.sh, NGPU says otherwise",
            )
        except InputError as error:
            mistake = error
    raise mistake


def make_plan(config: JobConfig, gpus: int) -> Plan:
    """Computes the plan; nothing is allocated, read from the data or fetched.

    Raises:
        InputError: what a run with these settings would end with, before it reads data.
    """
    validate_config(config, gpus, list(model_flavors()))
    ranks = data_parallel_degree(config, gpus)
    replicas = config.parallelism.data_parallel_replicate_degree
    layout = DataParallelLayout(replicas, ranks // replicas)
    config = upstream_view(config, run_folder_path(config), ranks)
    sizes = model_sizes(config)
    model = build_on_meta(sizes.args, config.training.dtype)
    step = step_arithmetic(config, sizes.args, ranks)
    return Plan(
        config=config,
        layout=layout,
        sizes=sizes,
        parts=count_parameters(model, config.encoder, sizes.source),
        states=state_memory(config, sizes.args, sizes.source, layout),
        activations=activation_memory(
            config,
            # Every backend of a GPU keeps the same, and varlen's stand-in on the CPU keeps all scores.
            replace(sizes.args, attention="sdpa"),
            step.micro_batch,
            step.lengths,
            sharded=layout.sharded,
        ),
        downloads=downloads(config, sizes.source),
        step=step,
    )
