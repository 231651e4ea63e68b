"""What tests of plans share: a small config, and the passes that they measure."""

from dataclasses import replace
from pathlib import Path

from titan_tts.plan.devices import Cluster, find_device
from titan_tts.plan.parameters import Model
from titan_tts.plan.step import Batches, Layout, Step
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.model.flops import Lengths

DEBUG = Path(__file__).resolve().parents[2] / "train_configs/debug.toml"
H200 = find_device("H200")
SMALL = ["--data.max_frames=64", "--data.num_buckets=2", "--encoder.n_layers=1"]
SMALL += ["--training.mixed_precision_param=bfloat16"]
SMALL += ["--compile.components=model"]  # each stack takes seconds to compile


def debug_config(*arguments: str, **sections: dict):
    """The debug config with short batches."""
    return shipped_debug_config(*SMALL, *arguments, **sections)


def shipped_debug_config(*arguments: str, **sections: dict):
    config = load_config([f"--job.config_file={DEBUG}", *arguments])
    for section, values in sections.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return config


def step_of(
    config,
    model: Model,
    layout: Layout,
    micro_batch: int = 12,
    accumulation: int = 1,
    lengths: Lengths = Lengths(64, 40, 64),
) -> Step:
    """A step of a config in this layout, on H200 in one node."""
    degrees = {
        "data_parallel_replicate_degree": layout.replicas,
        "data_parallel_shard_degree": layout.shards,
        "tensor_parallel_degree": layout.tensor,
        "backend": "megatron" if layout.tensor > 1 else "torchtitan",
    }
    placed = replace(config, parallelism=replace(config.parallelism, **degrees))
    cluster = Cluster(H200, layout.gpus, 1)
    return Step(placed, model, cluster, Batches(lengths, micro_batch, accumulation))
