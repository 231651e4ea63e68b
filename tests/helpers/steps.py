"""A trainer that is about to make a step, and the micro-batches of one."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from tests.helpers.small_models import small_args
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.flow.objective import FlowMatching, NoisyBatch, squared_error_sums
from torchtitan.models.dit_tts.infra.divergence import DivergenceGuard
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.optimizer import build_tts_lr_schedulers, build_tts_optimizers
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.trainer import DiTTTSTrainer

ARGS = small_args(latent_channels=128, text_vocab_size=8)
CONFIG = ["--training.steps=20", "--metrics.log_freq=10", "--metrics.no-enable-tensorboard"]
CONFIG += ["--optimizer.implementation=foreach", "--training.mixed_precision_param=float32"]
MICRO_BATCHES = 3


def trainer_on(device: str, dims: ParallelDims, *arguments: str) -> DiTTTSTrainer:
    """With all that a step needs, and neither a folder nor data; about to make a step that is not
    logged."""
    trainer = DiTTTSTrainer.__new__(DiTTTSTrainer)
    config = trainer.job_config = load_config([*CONFIG, *arguments])
    args = trainer.model_args = ARGS
    trainer.device, trainer.parallel_dims = torch.device(device), dims
    with torch.device(device):
        model = parallelize_dit_tts(DiTTTSModel(args), dims, config)
    trainer.model_parts = [model]
    trainer.optimizers = build_tts_optimizers([model], config.optimizer, dims)
    trainer.lr_schedulers = build_tts_lr_schedulers(trainer.optimizers, config.lr_scheduler, 20)
    trainer.metrics_processor = TTSMetricsProcessor(config, dims, args)
    trainer.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    trainer.progress = SimpleNamespace(at=lambda step, part: None)
    trainer.divergence, trainer.global_batch = DivergenceGuard(10.0), 1
    trainer.ema = EMA(model, [0.9, 0.999])
    trainer.train_context = dist_utils.get_train_context(False)
    trainer.loss_fn, trainer.maybe_enable_amp = squared_error_sums, nullcontext()
    trainer.forward_pass = trainer.build_forward_pass(None)
    trainer.forward_pass.add_noise = FlowMatching().add_noise
    trainer.benchmark = None
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
            "speaker_frames": torch.full((rows,), 8),
            "text_ids": torch.zeros(rows, 4, dtype=torch.int64),
            "text_tokens": torch.full((rows,), 4),
            "text_positions": torch.rand(rows, 4),
            "frames": lengths,
            "global_batch": torch.tensor(1),
            "row": torch.arange(first, first + rows),
            "global_batch_size": torch.tensor(rows * MICRO_BATCHES),
            "sample_id": [f"s{row}" for row in range(rows)],
            "replaced": 0,
        }
        batches.append((batch, torch.where(valid, 0, IGNORE_INDEX)))
    return batches


def problem(latents, global_batch, row, global_batch_size) -> NoisyBatch:
    """Times, noise and dropout that differ from row to row and from step to step."""
    generator = torch.Generator().manual_seed(int(1000 * global_batch + row[0]))
    # Of as many frames as the loader pads to: what is trimmed leaves the rest unchanged.
    noise = torch.randn(len(latents), 16, 128, generator=generator)[:, : latents.shape[1]]
    t = (row + 0.5) / global_batch_size
    noisy = latents + t[:, None, None] * (noise - latents)
    return NoisyBatch(noisy, t, noise - latents, row % 2 == 0, row % 3 != 1, row % 2 < 2)


def step_data(step: int) -> list[tuple[dict, torch.Tensor]]:
    """Micro-batches with other numbers of valid frames and of padded ones."""
    torch.manual_seed(step)
    batches = loaded()
    for number, (batch, _) in enumerate(batches):
        batch["global_batch"] = torch.tensor(step)
        batch["text_ids"] = torch.randint(1, 8, (2, 4))
        batch["text_tokens"][0] = 2
        batch["speaker_frames"][1] = 4 * number - 4 if number else 8
        batch["sample_id"] = [f"{step}-{number}-{row}" for row in range(2)]
    valid = [int((labels != IGNORE_INDEX).sum()) for _, labels in batches]
    assert len({*valid, 32}) == MICRO_BATCHES + 1
    return batches
