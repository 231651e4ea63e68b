"""A caption among the conditions: hidden by itself, and nothing to a model without captions."""

import hashlib
from dataclasses import replace

import pytest
import torch

from tests.helpers.small_models import (
    initialized_model,
    padded_inputs,
    random_model,
    small_args,
    until,
)

PLAIN = small_args(text_vocab_size=259)
CAPTIONED = replace(PLAIN, max_caption_tokens=8)
HIDDEN, SHOWN = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)


def inputs(captions=(6, 3)):
    batch = padded_inputs(PLAIN, [7, 5], [4, 6], [9, 3])
    ids = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    return batch, {"caption_ids": ids, "caption_mask": until(list(captions), 8)}


def test_a_model_without_captions_is_as_it_was_before_there_were_any():
    """Names, shapes and initial weights, as recorded at 9b58d17e."""
    model = initialized_model(PLAIN)
    named = [f"{name}{tuple(each.shape)}" for name, each in model.named_parameters()]
    assert hashlib.sha256(",".join(named).encode()).hexdigest()[:16] == "4d075dd1a88a2e11"
    total = sum(each.detach().double().abs().sum() for each in model.parameters())
    assert float(total) == pytest.approx(13265.764586337315, rel=1e-9)
    own = dict(initialized_model(CAPTIONED).named_parameters())
    assert all(torch.equal(own.pop(name), each) for name, each in model.named_parameters())
    assert {name.partition(".")[0] for name in own} == {"caption_encoder"}


@torch.no_grad()
@pytest.mark.parametrize("task", ["speech", "duration"])
def test_each_of_reference_and_caption_is_hidden_alone(task):
    model = random_model(replace(CAPTIONED, task=task))
    (batch, caption), no_caption = inputs(), inputs((0, 0))[1]
    no_reference = {"speaker_mask": torch.zeros_like(batch["speaker_mask"])}

    def output(*given, **kept):
        changed = {name: each for entries in given for name, each in entries.items()}
        found = model(**batch | changed, **kept)
        return found[batch["frame_mask"]] if task == "speech" else found

    both, without = output(caption), output(no_caption)
    torch.testing.assert_close(output(caption, keep_caption=HIDDEN), without)
    torch.testing.assert_close(output(caption, keep_caption=SHOWN, keep_speaker=SHOWN), both)
    alone = output(caption, no_reference)
    torch.testing.assert_close(output(caption, keep_speaker=HIDDEN), alone)
    neither = output(no_caption, no_reference)
    kept = {"keep_speaker": HIDDEN, "keep_caption": HIDDEN}
    torch.testing.assert_close(output(caption, **kept), neither)
    found = [both, without, alone, neither]
    assert all((a - b).abs().max() > 1e-3 for n, a in enumerate(found) for b in found[:n])
    # What stands in the padding of a caption is not read.
    ids = caption["caption_ids"].masked_fill(~caption["caption_mask"], 7)
    torch.testing.assert_close(output(caption, {"caption_ids": ids}), both)
