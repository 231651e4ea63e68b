"""What the model's own speaker encoder makes of latents."""

import torch
from torch import Tensor

from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.speech.sampling.sampler import pad_stack
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer


@torch.no_grad()
def speaker_embeddings(
    model: DiTTTSModel,
    tokenizer: ConditionedTokenizer,
    latents: list[Tensor],
    max_frames: int,
    device: torch.device,
) -> Tensor:
    """(N, E) float32 on the CPU: the speaker encoder's output, averaged over the patches of each.

    It goes through the model's `encode_conditions`, so that sharded weights are gathered.

    Args:
        latents: N times (T, C), at least one frame each; their first `max_frames` count.
    """
    speaker, speaker_mask = pad_stack([each[:max_frames].float() for each in latents])
    # Any text will do: it does not reach the speaker encoder.
    ids = torch.tensor(tokenizer.encode("a")).repeat(len(latents), 1)
    features = None
    if model.text_encoder is None:
        features = torch.zeros(*ids.shape, model.args.text_dim, device=device)
    found = model.encode_conditions(
        ids.to(device),
        torch.ones_like(ids, dtype=torch.bool).to(device),
        speaker.to(device),
        speaker_mask.to(device),
        features,
    )
    valid = found.speaker_mask[..., None]
    return ((found.speaker.float() * valid).sum(1) / valid.sum(1)).cpu()
