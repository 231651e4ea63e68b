"""What gradients lose when ranks sum them in bfloat16 ([training] mixed_precision_reduce).

    python benchmarks/reduce_dtype.py        # 5 minutes on 2 cores

On gloo, with the debug flavor: the relative error of the summed gradient against the sum in float32, of the same
gradients of each rank; and the loss of 50 steps on four ranks, against the same run with float32 and against
runs with other seeds. Writes benchmarks/results/reduce_dtype.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from tools.harness import forked, runs  # noqa: E402
from torchtitan.models.dit_tts.config.manager import load_config  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.infra.parallelize import (  # noqa: E402
    begin_micro_batch,
    local_tensor,
)
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402
from torchtitan.models.dit_tts.train_spec import get_train_spec  # noqa: E402

STEPS, RANKS, SEEDS = 50, 4, (0, 1, 2)
# replicas, shards, micro-batches
LAYOUTS = {
    "FSDP2, 2 ranks": (1, 2, 1),
    "FSDP2, 4 ranks": (1, 4, 1),
    "FSDP2, 8 ranks": (1, 8, 1),
    "FSDP2, 4 ranks, 4 micro-batches": (1, 4, 4),
    "HSDP, 2 x 2 ranks, 4 micro-batches": (2, 2, 4),
    "DDP, 4 ranks": (4, 1, 1),
    "DDP, 4 ranks, 4 micro-batches": (4, 1, 4),
}
FLAVOR = DiTTTSModelArgs(
    **dict(dim=192, n_layers=4, n_heads=4, mlp_dim=528, adaln_rank=32, timestep_dim=128),
    **dict(speaker_dim=128, speaker_n_layers=2, speaker_n_heads=2, speaker_mlp_dim=352),
    **dict(text_dim=128, text_n_layers=2, text_n_heads=2, text_vocab_size=260),
)


def gradient(dims: ParallelDims, reduce: str, micro_batches: int) -> list[torch.Tensor]:
    """This rank's shards of the gradient of its own random batches."""
    config = load_config(
        [f"--training.mixed_precision_reduce={reduce}", "--activation_checkpoint.mode=none"]
    )
    torch.manual_seed(0)
    model = get_train_spec().model_cls(FLAVOR)
    with torch.no_grad():
        for weight in model.parameters():  # none is zero
            weight.normal_(std=weight.shape[-1] ** -0.5)
    model = get_train_spec().parallelize_fn(model, dims, config)
    torch.manual_seed(1 + dist.get_rank())
    for left in reversed(range(micro_batches)):
        begin_micro_batch(model, dims, config.parallelism, last=left == 0)
        batch = {
            "latents": torch.randn(2, 64, FLAVOR.latent_channels),
            "t": torch.rand(2),
            "frame_mask": torch.ones(2, 64, dtype=torch.bool),
            "text_ids": torch.randint(0, 260, (2, 20)),
            "text_mask": torch.ones(2, 20, dtype=torch.bool),
            "speaker": torch.randn(2, 32, FLAVOR.latent_channels),
            "speaker_mask": torch.ones(2, 32, dtype=torch.bool),
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=not dims.fsdp_enabled):
            output = model(**batch)
        (output - torch.randn(output.shape)).square().mean().backward()
    return [local_tensor(w.grad) for w in model.parameters() if w.grad is not None]


def measure_gradient(rank: int, ranks: int, layout: tuple[int, int, int], folder: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks
    )
    torch.set_num_threads(1)
    replicas, shards, micro_batches = layout
    dims = ParallelDims(replicas, shards, 1, 1, 1, 1, 1, ranks)
    dims.build_mesh()
    exact, rounded = (gradient(dims, each, micro_batches) for each in ("float32", "bfloat16"))
    sums = torch.tensor([0.0, 0.0], dtype=torch.float64)
    for one, other in zip(exact, rounded, strict=True):
        sums += torch.stack([(one - other).double().square().sum(), one.double().square().sum()])
    dist.all_reduce(sums)
    if rank == 0:
        error, size = sums.sqrt().tolist()
        (folder / "error.json").write_text(json.dumps(error / size))
    dist.destroy_process_group()


def losses(folder: Path, name: str, reduce: str, seed: int) -> np.ndarray:
    options = f"--training.steps={STEPS} --metrics.log_freq=1 --checkpoint.no-enable"
    options += " --parallelism.data_parallel_shard_degree=4 --validation.no-enable"
    options += f" --training.mixed_precision_reduce={reduce} --debug.seed={seed}"
    options += f" --data.seed={seed} --data.path={folder}/data/train"
    found = runs.run(folder, name, options.split(), RANKS).metrics()
    return np.array([found[step]["loss"] for step in range(1, STEPS + 1)])


def measure(folder: Path) -> dict[str, Any]:
    errors = {}
    for name, layout in LAYOUTS.items():
        place = folder / name
        place.mkdir()
        ranks = layout[0] * layout[1]
        forked.run_ranks(measure_gradient, ranks, ranks, layout, place)
        errors[name] = json.loads((place / "error.json").read_text())
    prepare = f"prepare assets/spoken_digits/spoken_digits.tar {folder}/data --loudness=off"
    command = [sys.executable, "-m", "titan_tts", *prepare.split(), "--max-silence=off"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    plain = [losses(folder, f"float32_{seed}", "float32", seed) for seed in SEEDS]
    rounded = losses(folder, "bfloat16", "bfloat16", SEEDS[0])
    others = [np.abs(each - plain[0]) for each in plain[1:]]
    return {
        "gradient_error": errors,
        "loss": {"first": plain[0][0], "last": plain[0][-1]},
        "loss_difference": {
            "bfloat16": {
                "mean": np.abs(rounded - plain[0]).mean(),
                "max": np.abs(rounded - plain[0]).max(),
            },
            "other_seeds": {"mean": np.mean(others), "max": np.max(others)},
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/reduce_dtype.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder))
    text = json.dumps({**report, "conditions": environment()}, indent=1) + "\n"
    write_atomic(Path(options.output), text)
    for name, error in report["gradient_error"].items():
        print(f"{name:36} relative error of the gradient {error:.2%}")
    for name, row in report["loss_difference"].items():
        print(f"loss, {name:12} mean difference {row['mean']:.2e}, largest {row['max']:.2e}")
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
