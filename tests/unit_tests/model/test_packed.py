"""Samples packed in one row against the same samples padded to one length."""

import pytest
import torch

from tests.helpers.packed_batches import in_one_row, streams
from tests.helpers.small_models import random_model, small_args
from torchtitan.models.dit_tts.model import cpu_kernels
from torchtitan.models.dit_tts.model.model import DiTTTSModel

FRAMES, TEXT, SPEAKER = [5, 12, 0, 9, 1], [3, 7, 0, 0, 2], [6, 0, 0, 13, 4]
KEEP_TEXT = torch.tensor([True, True, True, True, False])
KEEP_SPEAKER = torch.tensor([True, True, True, False, True])
# Sizes of the row leave some padding, and none for the references: 8 + 0 + 0 + 16 + 4 frames.
SIZES, LONGEST = (32, 14, 7), (12, 7, 4)


@pytest.fixture
def model() -> DiTTTSModel:
    sizes = dict(dim=24, n_layers=3, n_heads=3, speaker_n_layers=2, latent_channels=6)
    return random_model(
        small_args(
            **sizes, text_vocab_size=20, text_n_layers=2, text_positions="scaled", ctc_layer=2
        )
    )


def mask(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def padded_inputs() -> dict:
    draw = torch.Generator().manual_seed(2)
    frames, text, speaker = mask(FRAMES), mask(TEXT), mask(SPEAKER)
    n = len(FRAMES)
    return {
        "latents": torch.randn(n, 12, 6, generator=draw) * frames[..., None],
        "t": torch.rand(n, generator=draw),
        "frame_mask": frames,
        "text_ids": torch.randint(1, 20, (n, 7), generator=draw) * text,
        "text_mask": text,
        "speaker": torch.randn(n, 13, 6, generator=draw) * speaker[..., None],
        "speaker_mask": speaker,
        "keep_text": KEEP_TEXT,
        "keep_speaker": KEEP_SPEAKER,
        "text_positions": torch.rand(n, 7, generator=draw),
    }


def packed_inputs(padded: dict) -> dict:
    kinds = {"latents": FRAMES, "frame_mask": FRAMES, "speaker": SPEAKER, "speaker_mask": SPEAKER}
    kinds |= dict.fromkeys(("text_ids", "text_mask", "text_positions"), TEXT)
    wide = {"speaker": (28, 4), "speaker_mask": (28, 4), "latents": (32, 1), "frame_mask": (32, 1)}
    found = dict(padded)
    for name, lengths in kinds.items():
        value = torch.nn.functional.pad(
            padded[name], (0, 0) * (padded[name].dim() - 2) + (0, 3)
        )  # so that 13 frames can have 4 patches
        found[name] = in_one_row(value, lengths, *wide.get(name, (14, 1)))
    return found | {"packed": streams(FRAMES, TEXT, SPEAKER, SIZES, LONGEST)}


def outcome(model: DiTTTSModel, inputs: dict) -> list[torch.Tensor]:
    """Outputs at valid frames, sample by sample, and the gradients of a loss on all of them."""
    model.zero_grad()
    valid = inputs["frame_mask"]
    prediction, logits = (output[valid] for output in model(**inputs))
    draw = torch.Generator().manual_seed(3)
    loss = sum(
        (output * torch.randn(output.shape, generator=draw)).sum()
        for output in (prediction, logits)
    )
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [prediction.detach(), logits.detach(), *gradients]


@pytest.mark.parametrize("kernels", (True, False), ids=("cpu kernels", "definitions"))
@pytest.mark.parametrize("tail", (0.0, 9.0), ids=("zeros behind", "values behind"))
def test_outputs_and_gradients_are_those_of_padded_samples(model, kernels, tail, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "use_cpu_kernels", lambda x: kernels)
    padded = padded_inputs()
    expected = outcome(model, padded)
    packed = packed_inputs(padded)
    packed["latents"] = packed["latents"] + tail * ~packed["frame_mask"][..., None]
    found = outcome(model, packed)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
