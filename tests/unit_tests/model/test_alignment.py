"""The alignment head: what it reads, what it leaves alone, and what it costs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.small_models import full_inputs, initialized_model, random_model, small_args
from torchtitan.models.dit_tts.model.alignment import is_of_head, parameter_counts
from torchtitan.models.dit_tts.model.flops import Lengths, forward_flops, training_flops
from torchtitan.models.dit_tts.model.model import DiTTTSModel

ARGS = small_args(n_layers=4, text_vocab_size=8)
LENGTHS = Lengths(frames=12, text_tokens=5, speaker_frames=8)


def inputs(args=ARGS):
    torch.manual_seed(5)
    return full_inputs(args, 2, LENGTHS.frames, LENGTHS.text_tokens, LENGTHS.speaker_frames)


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_the_gradient_reaches_the_blocks_up_to_the_head(layer):
    model = random_model(replace(ARGS, ctc_layer=layer))
    prediction, logits = model(**inputs())
    assert prediction.shape == (2, 12, 16) and logits.shape == (2, 12, 257)
    assert logits.dtype == torch.float32
    logits.log_softmax(-1)[..., 3].sum().backward()
    reached = [
        any(p.grad is not None and bool(p.grad.any()) for p in block.parameters())
        for block in model.layers
    ]
    assert reached == [number < layer for number in range(4)]
    assert model.input.weight.grad.any() and model.output.weight.grad is None


def test_the_head_reads_the_normalized_output_of_its_block():
    model = random_model(replace(ARGS, ctc_layer=2))
    seen = []
    model.layers[1].register_forward_hook(lambda block, args, x: seen.append(x))
    _, logits = model(**inputs())
    [x] = seen
    head = model.alignment.ctc
    normed = x / (x.square().mean(-1, keepdim=True) + ARGS.norm_eps).sqrt() * head.norm.weight
    expected = normed @ head.output.weight.T + head.output.bias
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_model_is_the_same_with_a_head_and_samplers_do_not_run_it():
    plain, headed = initialized_model(ARGS), initialized_model(replace(ARGS, ctc_layer=2))
    weights, batch = dict(plain.named_parameters()), inputs()
    for name, parameter in headed.named_parameters():
        assert is_of_head(name) or torch.equal(parameter, weights[name]), name
    assert torch.equal(plain(**batch), headed(**batch)[0])
    assert headed.alignment.ctc.output.weight.std() > 0.1
    of_model = sum(p.numel() for p in plain.parameters())
    assert parameter_counts(headed.named_parameters()) == (of_model, 32 + 257 * 33)
    headed.alignment.ctc.register_forward_hook(lambda *_: pytest.fail("the head ran"))
    names = ("text_ids", "text_mask", "speaker", "speaker_mask")
    conditions = headed.encode_conditions(**{name: batch[name] for name in names})
    headed.denoise(batch["latents"], batch["t"], batch["frame_mask"], conditions)


def test_training_flops_equal_the_counter_and_generation_has_none_of_them():
    args = replace(ARGS, ctc_layer=2)
    with torch.device("meta"):
        model = DiTTTSModel(args)
        batch = {name: value.to("meta") for name, value in inputs().items()}
    with FlopCounterMode(display=False) as counter:
        prediction, logits = model(**batch)
        (prediction.sum() + logits.sum()).backward()
    assert counter.get_total_flops() == 2 * training_flops(args, LENGTHS)
    assert forward_flops(args, LENGTHS) == forward_flops(ARGS, LENGTHS)
