"""The duration predictor: what its length is a sum of, and what it does not depend on."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.small_models import full_inputs, small_args, until
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops, training_flops

ARGS = small_args(task="duration", text_vocab_size=20)


@pytest.fixture
def model() -> DurationModel:
    """Every parameter is random, so that none hides what another does."""
    torch.manual_seed(0)
    found = DurationModel(ARGS)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    return found.eval()


def inputs(rows: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = full_inputs(ARGS, rows, frames=9, text=7, speaker=8)
    found["text_ids"] = torch.randint(3, 20, (rows, 7))
    return found


@torch.no_grad()
def test_it_is_the_sum_of_positive_frames_of_the_tokens(model):
    batch = inputs() | {"text_mask": until([7, 4, 1], 7)}
    of_tokens = []
    model.output.register_forward_hook(lambda _, __, out: of_tokens.append(out[..., 0]))
    frames = model(**batch).exp()
    expected = (of_tokens[0].exp() * batch["text_mask"]).sum(1)
    torch.testing.assert_close(frames, expected)
    assert len({round(float(n), 3) for n in frames}) == 3


@torch.no_grad()
def test_a_row_alone_is_as_in_a_batch_and_nothing_of_the_utterance_is_read(model):
    """Texts and references of other lengths, also in patches, and another utterance of another length."""
    batch = inputs() | {"text_mask": until([7, 4, 2], 7), "speaker_mask": until([8, 3, 0], 8)}
    found = model(**batch)
    for row, (tokens, frames) in enumerate([(7, 8), (4, 3), (2, 1)]):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        for name in ("text_ids", "text_mask", "text_positions"):
            alone[name] = alone[name][:, :tokens]
        for name in ("speaker", "speaker_mask"):
            alone[name] = alone[name][:, :frames]
        alone |= {"latents": torch.randn(1, 30, 16), "t": torch.rand(1)}
        alone["frame_mask"] = torch.ones(1, 30, dtype=torch.bool)
        torch.testing.assert_close(model(**alone)[0], found[row], rtol=0, atol=1e-5)


@torch.no_grad()
def test_text_and_voice_act_and_a_hidden_voice_is_none(model):
    batch = inputs()
    found = model(**batch)
    other = model(**batch | {"speaker": torch.randn_like(batch["speaker"])})
    reversed_text = model(**batch | {"text_ids": batch["text_ids"].flip(1)})
    for changed in (other, reversed_text):
        assert (found - changed).abs().min() > 1e-3
    hidden = model(**batch, keep_speaker=torch.tensor([True, False, True]))
    none = model(**batch | {"speaker_mask": until([0, 0, 0], 8)})
    torch.testing.assert_close(hidden[::2], found[::2])
    torch.testing.assert_close(hidden[1], none[1])
    assert abs(none[1] - found[1]) > 1e-3
    names = ("text_ids", "text_mask", "speaker", "speaker_mask")
    conditions = model.encode_conditions(**{name: batch[name] for name in names})
    as_validation = model.denoise(batch["latents"], batch["t"], batch["frame_mask"], conditions)
    torch.testing.assert_close(as_validation, found)


def test_an_empty_text_has_a_length_and_finite_gradients(model):
    model(**inputs() | {"text_mask": until([0, 0, 3], 7)}).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_flops_equal_the_counter():
    args = small_args(task="duration", text_vocab_size=20, dim=48, n_layers=3)
    lengths = Lengths(frames=11, text_tokens=7, speaker_frames=6)
    with torch.device("meta"):
        counted = DurationModel(args)
        batch = full_inputs(args, 2, 11, 7, 6)
    with FlopCounterMode(display=False) as counter:
        out = counted(**batch)
        assert counter.get_total_flops() == 2 * forward_flops(args, lengths)
        out.sum().backward()
    assert counter.get_total_flops() == 2 * training_flops(args, lengths)
