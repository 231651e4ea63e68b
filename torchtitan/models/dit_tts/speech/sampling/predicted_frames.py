"""Text and a speaker's reference to a length, by the duration predictor."""

from collections.abc import Sequence

import torch

from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, encode_requests
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer


@torch.no_grad()
def predict_frames(
    model: DurationModel,
    tokenizer: ConditionedTokenizer,
    requests: Sequence[SpeechRequest],
    device: torch.device,
    text_encoder: PretrainedTextEncoder | None = None,
) -> list[float]:
    """Latent frames of each request, not rounded, as one batch whose rows do not depend on each other.

    Args:
        requests: their own `frames` are not read.
        text_encoder: the frozen one of a model that has none inside.
    """
    conditions = encode_requests(model, tokenizer, requests, device, text_encoder)
    return model.log_frames(conditions).exp().tolist()
