"""What the ranks of a process group do in tests of tensor parallelism: a small model in float64, trained on a
layout of ranks beside the same model on one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_

from tests.helpers.small_models import full_inputs, random_model, small_args
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.optimizer import TTSOptimizers, build_tts_optimizers
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.train_spec import get_train_spec

# fp8 wants multiples of 16.
ARGS = small_args(text_vocab_size=8, latent_channels=8, speaker_dim=64, text_positions="aligned")
CONFIG = ["--training.mixed_precision_param=float32", "--activation_checkpoint.mode=full"]
CONFIG += ["--parallelism.backend=megatron", "--optimizer.implementation=foreach"]
SEQUENCE = ["--megatron.sequence_parallel"]
COMPILED = ["--compile.enable", "--compile.backend=aot_eager", "--compile.components=model"]
ROWS = 8

Layout = tuple[int, int, int]
"""replicas, shards, ranks of tensor parallelism"""

PLAIN = (1, 1, 1)
"""the model as it is, alike on every rank"""


@dataclass
class Training:
    """A model on a layout, with what is trained and saved with it."""

    layout: Layout
    model: DiTTTSModel
    optimizers: TTSOptimizers
    ema: EMA
    place: int
    """data-parallel rank"""

    def states(self) -> dict[str, Any]:
        parts = ModelWrapper([self.model]).state_dict()
        return {**parts, "optimizer": self.optimizers, "ema": self.ema}

    def step(self, number: int) -> tuple[float, float]:
        """Loss of the global batch and gradient norm."""
        ranks = self.layout[0] * self.layout[1]
        rows = slice(self.place * ROWS // ranks, (self.place + 1) * ROWS // ranks)
        inputs = {name: value[rows] for name, value in batch(number).items()}
        # The network's output is float32, whose rounding would hide what float64 shows.
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            loss = self.model(**inputs).square().sum() / ROWS
        loss.backward()
        total = loss.detach().clone()
        if self.layout != PLAIN:
            dist.all_reduce(total)
            total /= self.layout[2]
        norm = clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.ema.update()
        return total.item(), norm.item()


def batch(number: int) -> dict[str, torch.Tensor]:
    """Lengths that no number of ranks divides."""
    torch.manual_seed(number)
    inputs = full_inputs(ARGS, rows=ROWS, frames=7, text=3, speaker=12)
    inputs["text_ids"] = torch.randint(0, ARGS.text_vocab_size, (ROWS, 3))
    inputs["frame_mask"][::2, 4:] = False
    return inputs


def dims_of(layout: Layout) -> ParallelDims:
    replicas, shards, tensor = layout
    world = dist.get_world_size()
    dims = ParallelDims(replicas, shards, 1, tensor, 1, 1, 1, world)
    dims.build_mesh()
    return dims


def begin(layout: Layout, *arguments: str, seed: int = 0) -> Training:
    config = load_config([*CONFIG, *arguments])
    model, place, dims = random_model(ARGS, seed).double(), 0, None
    if layout != PLAIN:
        dims = dims_of(layout)
        model = get_train_spec().parallelize_fn(model, dims, config)
        place = dist.get_rank() // layout[2]
    optimizers = build_tts_optimizers([model], config.optimizer, dims)  # type: ignore[arg-type]
    return Training(layout, model, optimizers, EMA(model, [0.5]), place)


def complete(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(found: Training, expected: Training, tolerance: float = 1e-9) -> None:
    for (name, value), other in zip(
        found.model.named_parameters(), expected.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            complete(value.detach()), other.detach(), atol=tolerance, rtol=0, msg=name
        )
    for (name, value), other in zip(
        found.ema.averages[0.5].items(), expected.ema.averages[0.5].values(), strict=True
    ):
        # Averages are float32.
        torch.testing.assert_close(complete(value), other, atol=1e-6, rtol=0, msg=name)


def compare(layout: Layout, *arguments: str, steps: int = 2) -> None:
    """Losses, gradient norms and what the steps make of the weights are those of one process."""
    alone = begin(PLAIN, "--parallelism.backend=torchtitan")
    spread = begin(layout, *arguments)
    for number in range(steps):
        torch.testing.assert_close(spread.step(number), alone.step(number), atol=1e-9, rtol=1e-9)
    assert_same(spread, alone)


def overlap(layout: Layout, expected: str, *arguments: str) -> None:
    """The products and collectives of a backward pass begin in this order, twice in each block."""
    wanted = expected.split()
    training = begin(layout, "--activation_checkpoint.mode=none", *arguments)
    training.step(0)  # which compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        training.step(0)
    begun = sorted(recorded.events(), key=lambda event: event.time_range.start)
    names = [event.name.split("::")[-1] for event in begun]
    traced = {"mm", "wait_tensor", "all_reduce", "reduce_scatter_tensor", "gather_again"}
    names = [name for name in names if name in traced]
    found = [names[i : i + len(wanted)] == wanted for i in range(len(names))]
    assert sum(found) == 2 * ARGS.n_layers, names


def checkpoints(folder: Path, written: list[Layout], read: list[Layout]) -> None:
    """The checkpoint of one layout is one of every other: after a further step all is as if it had been
    trained on one process throughout."""
    alone = begin(PLAIN, "--parallelism.backend=torchtitan")
    for layout in written:
        training = begin(layout)
        training.step(0)
        dcp.save(training.states(), checkpoint_id=folder / str(layout))
    expected = [alone.step(number) for number in range(2)]
    for source in written:
        for layout in read:
            training = begin(layout, seed=1)
            training.step(2)  # so that it has states of its own, which must go
            states = training.states()
            dcp.load(states, checkpoint_id=folder / str(source))
            ModelWrapper([training.model]).load_state_dict(states)
            found = training.step(1)
            torch.testing.assert_close(found, expected[1], atol=1e-9, rtol=1e-9)
            assert_same(training, alone)


def run(rank: int, ranks: int, folder: Path, jobs: list[tuple[Callable, tuple, dict]]) -> None:
    """Runs the jobs one after another in a process group of this many ranks."""
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    # What the config calls float32 is float64 here.
    with mock.patch.dict(TORCH_DTYPE_MAP, {"float32": torch.float64}):
        for job, arguments, options in jobs:
            job(*arguments, **options)
    dist.destroy_process_group()
