"""Factors of a run's speed: size, layout, batch, compile mode and so on.

Factors are plain values, named alike in grids, in `benchmark.json` and in the analysis.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.dit_tts.config.batch_split import fewest_micro_batches

FACTORS = (
    *("size", "backend", "layout", "tensor_parallel", "gpus", "nodes", "batch", "accumulation"),
    *("checkpointing", "compile", "precision", "attention", "optimizer", "lengths"),
)
"""Names of all factors. `batch` is the micro-batch: samples of the longest bucket on one rank."""

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def checkpointing_name(options: Mapping[str, Any]) -> str:
    """`[activation_checkpoint]` in a word or two: none, full, op, every 2, memory_budget 0.9."""
    mode, option = options["mode"], options["selective_ac_option"]
    if mode == "memory_budget":
        return f"memory_budget {options['memory_budget']:g}"
    if mode != "selective":
        return mode
    return "op" if option == "op" else f"every {option}"


def layout_name(replicas: int, shards: int) -> str:
    """single, ddp, fsdp or hsdp."""
    if shards == 1:
        return "ddp" if replicas > 1 else "single"
    return "hsdp" if replicas > 1 else "fsdp"


def factors(config: Mapping[str, Any], gpus: int, gpus_per_node: int) -> dict[str, str | int]:
    """The factors of a run.

    Args:
        config: a resolved config as nested dictionaries.
        gpus_per_node: of them on each machine.
    """
    parallelism, training, compiled = config["parallelism"], config["training"], config["compile"]
    tensor_parallel = parallelism["tensor_parallel_degree"]
    replicas = parallelism["data_parallel_replicate_degree"]
    ranks = gpus // tensor_parallel
    total, batch = training["global_batch_size"], training["local_batch_size"]
    if not batch:
        per_rank = max(1, total // ranks)
        # The configs of older runs have no such key.
        batch = per_rank // fewest_micro_batches(per_rank, training.get("max_local_batch_size", 0))
    precision = training["mixed_precision_param"]
    # The configs of older runs have no [megatron].
    is_fp8 = "float8" in config["model"]["converters"] or config.get("megatron", {}).get("fp8")
    optimizer, state = config["optimizer"]["name"], config["optimizer"]["state_dtype"]
    return {
        "size": config["model"]["flavor"],
        "backend": parallelism.get("backend", "torchtitan"),
        "layout": layout_name(replicas, ranks // replicas),
        "tensor_parallel": tensor_parallel,
        "gpus": gpus,
        "nodes": -(-gpus // gpus_per_node),
        "batch": batch,
        "accumulation": total // (batch * ranks) if total > 0 else 1,
        "checkpointing": checkpointing_name(config["activation_checkpoint"]),
        "compile": compiled["mode"] if compiled["enable"] else "off",
        "precision": "fp8" if is_fp8 else _PRECISIONS.get(precision, precision),
        "attention": config["attention"]["backend"],
        "optimizer": optimizer if state == "float32" else f"{optimizer} {state}",
        "lengths": config["benchmark"]["lengths"] if config["benchmark"]["enable"] else "data",
    }
