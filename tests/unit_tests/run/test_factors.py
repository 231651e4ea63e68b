"""The factors of a run, from its resolved config."""

from dataclasses import asdict

import pytest

from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.run.factors import FACTORS, factors

DEBUG = ["--job.config_file", "train_configs/debug.toml"]


def of(args, gpus=4, gpus_per_node=4):
    return factors(asdict(load_config([*DEBUG, *args])), gpus, gpus_per_node)


@pytest.mark.long
def test_all_factors_of_the_debug_config():
    sizes = {"size": "debug", "backend": "torchtitan", "layout": "fsdp", "tensor_parallel": 1}
    batch = {"gpus": 4, "nodes": 1, "batch": 3, "accumulation": 1, "checkpointing": "none"}
    kernels = {"compile": "off", "precision": "fp32", "attention": "auto", "optimizer": "AdamW"}
    assert of([]) == sizes | batch | kernels | {"lengths": "data"} and tuple(of([])) == FACTORS
    assert of([], gpus=1)["layout"] == "single"
    assert of(["--parallelism.tensor_parallel_degree=2"], gpus=2)["layout"] == "single"
    assert of([], gpus=12, gpus_per_node=8)["nodes"] == 2


@pytest.mark.parametrize(
    "args, expected",
    [
        ("--parallelism.data_parallel_replicate_degree=4", {"layout": "ddp"}),
        ("--parallelism.data_parallel_replicate_degree=2", {"layout": "hsdp"}),
        ("--training.max_local_batch_size=2", {"batch": 1, "accumulation": 3}),
        ("--compile.enable --compile.mode=max-autotune", {"compile": "max-autotune"}),
        (
            "--parallelism.tensor_parallel_degree=2 --parallelism.backend=megatron",
            {"tensor_parallel": 2, "backend": "megatron", "batch": 6},
        ),
        ("--training.mixed_precision_param=bfloat16", {"precision": "bf16"}),
        ("--model.converters=float8", {"precision": "fp8"}),
        ("--megatron.fp8", {"precision": "fp8"}),
        ("--optimizer.state_dtype=8bit", {"optimizer": "AdamW 8bit"}),
        ("--activation_checkpoint.mode=full", {"checkpointing": "full"}),
        ("--activation_checkpoint.mode=selective", {"checkpointing": "every 2"}),
        ("--activation_checkpoint.mode=memory_budget", {"checkpointing": "memory_budget 0.5"}),
        (
            "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op",
            {"checkpointing": "op"},
        ),
        ("--benchmark.enable --benchmark.lengths=longest", {"lengths": "longest"}),
        ("--benchmark.lengths=longest --compile.mode=max-autotune", {}),
    ],
)
def test_each_setting_changes_its_factor_alone(args, expected):
    found, plain = of(args.split()), of([])
    assert {name: found[name] for name in FACTORS if found[name] != plain[name]} == expected
