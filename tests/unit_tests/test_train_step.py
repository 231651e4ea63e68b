"""The step of the trainer: the host waits for the device only where a step is logged, and replicas
exchange gradients once a step."""

from collections import Counter
from contextlib import ExitStack, nullcontext
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.dit_tts.config import load_config
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sum
from torchtitan.models.dit_tts.infra.compile import CompileWatch
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.optimizer import build_tts_lr_schedulers, build_tts_optimizers
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.planning.states import Layout, fake_ranks
from torchtitan.models.dit_tts.trainer import DiTTTSTrainer
from torchtitan.train import Trainer

ARGS = DiTTTSModelArgs(
    dim=32, n_layers=2, n_heads=2, mlp_dim=48, speaker_dim=32, speaker_n_layers=1,
    speaker_n_heads=2, speaker_mlp_dim=48, text_dim=32, adaln_rank=8, timestep_dim=16,
    text_vocab_size=8, text_n_layers=1, text_n_heads=2,
)  # fmt: skip
CONFIG = [
    "--training.steps=20",
    "--metrics.log_freq=10",
    "--metrics.no-enable-tensorboard",
    "--optimizer.implementation=foreach",
    "--training.mixed_precision_param=float32",
]
MICRO_BATCHES = 3
ONE = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


class NoWaiting(TorchDispatchMode):
    """Raises where a tensor goes from the CPU to the device and the host would wait for it. The other
    way, and reading a value, fails by itself: the device "meta" has none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if func._schema.name == "aten::copy_" else args[0]
            waits = not (kwargs or {}).get("non_blocking") and not args[2:]
            assert not (waits and source.is_cpu and out.is_meta), f"the host waits: {func}"
        return out


def trainer_on(device: str, dims: ParallelDims) -> DiTTTSTrainer:
    """With all that a step needs, and neither a folder nor data; about to make a step that is not
    logged."""
    trainer = DiTTTSTrainer.__new__(DiTTTSTrainer)
    config = trainer.job_config = load_config(CONFIG)
    trainer.device, trainer.parallel_dims, trainer.model_args = torch.device(device), dims, ARGS
    with torch.device(device):
        model = parallelize_dit_tts(DiTTTSModel(ARGS), dims, config)
    trainer.model_parts = [model]
    trainer.optimizers = build_tts_optimizers([model], config.optimizer, dims)
    trainer.lr_schedulers = build_tts_lr_schedulers(trainer.optimizers, config.lr_scheduler, 20)
    trainer.metrics_processor = TTSMetricsProcessor(config, dims, ARGS)
    trainer.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    trainer.ema = EMA(model, 0.999)
    trainer.compile_watch = CompileWatch(model)
    trainer.corrupt, trainer.loss_fn = FlowMatching().corrupt, squared_error_sum
    trainer.train_context = dist_utils.get_train_context(False)
    trainer.maybe_enable_amp = nullcontext()
    trainer.text_encoder = trainer.benchmark = None
    trainer.gradient_accumulation_steps = MICRO_BATCHES
    trainer.step, trainer.ntokens_seen, trainer.step_ids = 2, 0, []
    return trainer


def loaded(rows: int = 2, frames: int = 16) -> list[tuple[dict, torch.Tensor]]:
    """A step's micro-batches as they come from the loader."""
    batches = []
    for first in range(0, rows * MICRO_BATCHES, rows):
        lengths = torch.randint(4, frames + 1, (rows,))
        valid = torch.arange(frames) < lengths[:, None]
        batch = {
            "latents": torch.randn(rows, frames, 128),
            "speaker": torch.randn(rows, 8, 128),
            "speaker_mask": torch.ones(rows, 8, dtype=torch.bool),
            "text_ids": torch.zeros(rows, 4, dtype=torch.int64),
            "text_mask": torch.ones(rows, 4, dtype=torch.bool),
            "frames": lengths,
            "batch_number": torch.tensor(1),
            "batch_row": torch.arange(first, first + rows),
            "batch_rows": torch.tensor(rows * MICRO_BATCHES),
            "sample_id": [f"s{row}" for row in range(rows)],
            "replaced": 0,
        }
        batches.append((batch, torch.where(valid, 0, IGNORE_INDEX)))
    return batches


def test_no_step_waits_for_the_device_that_is_not_logged(monkeypatch):
    clip = dist_utils.clip_grad_norm_
    monkeypatch.setattr(  # the device "meta" has no foreach for it
        dist_utils, "clip_grad_norm_", lambda parameters, most, foreach: clip(parameters, most)
    )
    trainer = trainer_on("meta", ONE)
    with NoWaiting():
        trainer.train_step(trainer.batch_generator(loaded()))
    assert trainer.ema.num_updates == 1 and trainer.lr_schedulers.schedulers[0].last_epoch == 1


def test_upstreams_step_waits():
    """Or the test above would say nothing."""
    trainer = trainer_on("meta", ONE)
    with NoWaiting(), pytest.raises(AssertionError, match="the host waits"):
        Trainer.train_step(trainer, Trainer.batch_generator(trainer, loaded()))


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2), Layout(2, 2)], ids=lambda each: each.name)
def test_no_step_on_ranks_reads_a_value(layout):
    """A fake tensor has no value to read. Replicas reduce gradients in the last pass of a step."""
    with ExitStack() as modes:
        trainer = trainer_on("cpu", modes.enter_context(fake_ranks(layout)))
        batches = list(islice(trainer.batch_generator(loaded()), MICRO_BATCHES))
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        counted = modes.enter_context(Collectives())
        passes = []
        step = trainer.forward_backward_step

        def watched(**arguments):
            before = counted.calls.copy()
            loss = step(**arguments)
            passes.append(counted.calls - before)
            return loss

        trainer.forward_backward_step = watched
        trainer.train_step(iter(batches))
    units = 2 + ARGS.n_layers + (layout.shards > 1) + 1
    assert [each["allreduce_"] for each in passes] == [0, 0, units if layout.replicas > 1 else 0]
    scattered = units if layout.shards > 1 else 0
    assert [each["_reduce_scatter_base_"] for each in passes] == [scattered] * MICRO_BATCHES


class Collectives(TorchDispatchMode):
    """Calls of collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))
