"""Models that are small enough for tests, and their inputs."""

import math
from typing import Any

import torch

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.model.model import DiTTTSModel


def small_args(**sizes: Any) -> DiTTTSModelArgs:
    """No two widths are equal, and no number of heads is one of blocks."""
    defaults = dict(dim=32, n_layers=2, n_heads=4, mlp_dim=48, adaln_rank=6, timestep_dim=20)
    defaults |= dict(speaker_dim=24, speaker_n_layers=1, speaker_n_heads=2, speaker_mlp_dim=40)
    defaults |= dict(text_dim=28, text_n_layers=1, text_n_heads=2, latent_channels=16)
    return DiTTTSModelArgs(**defaults | sizes)


@torch.no_grad()
def initialized_model(args: DiTTTSModelArgs, seed: int = 0) -> DiTTTSModel:
    torch.manual_seed(seed)
    model = DiTTTSModel(args)
    model.init_weights()
    return model


@torch.no_grad()
def random_model(args: DiTTTSModelArgs, seed: int = 0) -> DiTTTSModel:
    """Every parameter is random: those that start at zero or one would hide errors in others."""
    model: Any = (DurationModel if args.task == "duration" else DiTTTSModel)(args)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator)
        matrix = value.dim() > 1
        parameter.copy_(value / math.sqrt(parameter.shape[-1]) if matrix else 1 + value / 2)
    return model


def full_inputs(
    args: DiTTTSModelArgs, rows: int, frames: int, text: int, speaker: int
) -> dict[str, torch.Tensor]:
    """Arguments of the model without padding, with random latents."""
    return {
        "latents": torch.randn(rows, frames, args.latent_channels),
        "t": torch.rand(rows),
        "frame_mask": torch.ones(rows, frames, dtype=torch.bool),
        "text_ids": torch.zeros(rows, text, dtype=torch.long),
        "text_mask": torch.ones(rows, text, dtype=torch.bool),
        "text_positions": ((torch.arange(text) + 0.5) / text).expand(rows, -1),
        "speaker": torch.randn(rows, speaker, args.latent_channels),
        "speaker_mask": torch.ones(rows, speaker, dtype=torch.bool),
    }


def one_rank(**degrees: int) -> Any:
    """Dimensions of one process, or of as many as `degrees` say."""
    from torchtitan.distributed import ParallelDims

    sizes = dict(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    return ParallelDims(**{**sizes, **degrees})


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To the bit, with the same names and dtypes."""
    assert expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def sharded_alone(model: DiTTTSModel) -> DiTTTSModel:
    """By FSDP2 on a mesh of this process, for which there is a group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from torchtitan.models.dit_tts.config.job_config import Parallelism
    from torchtitan.models.dit_tts.infra.parallelize import apply_fsdp

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, MixedPrecisionPolicy(), Parallelism(), False)
    return model


def until(lengths: list[int], padded: int) -> torch.Tensor:
    """Masks (B, padded), true at each row's first frames or tokens."""
    return torch.arange(padded) < torch.tensor(lengths)[:, None]


def padded_inputs(
    args: DiTTTSModelArgs, frames: list[int], text: list[int], speaker: list[int], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Arguments of the model for rows of these lengths, with numbers in the padding."""
    generator = torch.Generator().manual_seed(seed)
    masks = [until(lengths, max(lengths) + 2) for lengths in (frames, text, speaker)]
    latents, tokens, reference = (
        torch.randn(*mask.shape, width, generator=generator)
        for mask, width in zip(masks, (args.latent_channels, args.text_dim, args.latent_channels))
    )
    ids = args.text_vocab_size or args.first_condition_id + args.condition_tokens
    batch = {} if args.text_vocab_size else {"text_features": tokens}
    return batch | {
        "latents": latents,
        "t": torch.rand(len(frames), generator=generator),
        "frame_mask": masks[0],
        "text_ids": torch.randint(max(ids, 1), masks[1].shape, generator=generator),
        "text_mask": masks[1],
        "text_positions": torch.rand(masks[1].shape, generator=generator),
        "speaker": reference,
        "speaker_mask": masks[2],
    }
