"""Settings of speed and memory that cannot work, each refused in one sentence."""

import re

import pytest

from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError

GRAPHS = ["--compile.enable", "--compile.mode=reduce-overhead"]
TWO_STEPS = ["--training.global_batch_size=16", "--training.local_batch_size=8"]
BENCHMARK = ["--benchmark.enable", "--benchmark.steps=4", "--benchmark.warmup_steps=2"]
OFFLOAD = ["--training.enable_cpu_offload"]
REPLICAS = ["--parallelism.data_parallel_replicate_degree=2"]


@pytest.mark.parametrize(
    "arguments, ranks, message",
    [
        ([*GRAPHS, *TWO_STEPS], 1, "2 accumulation steps do not allow; set it to 'default'"),
        ([*GRAPHS, *TWO_STEPS, "--compile.components=encoders"], 1, "2 accumulation steps"),
        ([*GRAPHS, *BENCHMARK], 1, "warmup_steps = 2 with [compile] mode = 'reduce-overhead'"),
        (
            ["--activation_checkpoint.memory_budget=7"],
            1,
            "memory_budget = 7.0 must lie between 0 and 1",
        ),
        (["--training.dtype=bfloat16"], 1, "[training] dtype = 'bfloat16' is not supported"),
        (["--optimizer.state_dtype=bfloat16", "--optimizer.beta2=0.9995"], 1, "at most 0.999"),
        # The shard degree -1 stands for what is left of the processes.
        (OFFLOAD, 1, "enable_cpu_offload = true is not supported"),
        ([*OFFLOAD, *REPLICAS], 2, "enable_cpu_offload = true is not supported"),
    ],
)
def test_refused(arguments, ranks, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        validate_config(load_config(arguments), ranks, ["debug"])
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)


@pytest.mark.parametrize(
    "arguments, ranks",
    [
        ([*GRAPHS, "--training.global_batch_size=16", "--training.local_batch_size=16"], 1),
        ([*GRAPHS, *TWO_STEPS, "--compile.components=loss"], 1),  # which has no mode
        ([*GRAPHS, *BENCHMARK, "--benchmark.warmup_steps=3"], 1),
        ([*TWO_STEPS, "--compile.enable", "--compile.mode=max-autotune-no-cudagraphs"], 1),
        (["--optimizer.state_dtype=bfloat16", "--optimizer.beta2=0.999"], 1),
        (OFFLOAD, 2),
        ([*OFFLOAD, *REPLICAS], 4),
    ],
)
def test_allowed(arguments, ranks):
    validate_config(load_config(arguments), ranks, ["debug"])
