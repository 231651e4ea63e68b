"""Samples packed in one row against the same samples padded to one length."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.helpers.packed_batches import in_one_row, streams
from tests.helpers.small_models import padded_inputs, random_model, small_args
from torchtitan.models.dit_tts.infra.compile import apply_compile
from torchtitan.models.dit_tts.infra.kernels import use_operations
from torchtitan.models.dit_tts.model.conditions import condition_inputs
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model.packed_attention import packed_attention
from torchtitan.models.dit_tts.streams import stream_of, valid_mask

FRAMES, TEXT, SPEAKER = [5, 12, 0, 9, 1], [3, 7, 0, 0, 2], [6, 0, 0, 13, 4]
CAPTIONS, KEEP_CAPTION = (
    torch.tensor([2, 4, 0, 0, 3]),
    torch.tensor([True, True, False, True, False]),
)
KEEP_TEXT = torch.tensor([True, True, True, True, False])
KEEP_SPEAKER = torch.tensor([True, True, True, False, True])
# Sizes of the row leave some padding, and none for the references: 8 + 0 + 0 + 16 + 4 frames.
SIZES, LONGEST = (32, 14, 7), (12, 7, 4)


@pytest.fixture(
    params=[{}, {"max_caption_tokens": 4}, {"max_caption_tokens": 4, "speaker_reference": False}],
    ids=str,
)
def model(request) -> DiTTTSModel:
    sizes = dict(dim=24, n_layers=3, n_heads=3, speaker_n_layers=2, latent_channels=6)
    sizes |= dict(text_vocab_size=20, text_n_layers=2, text_positions="aligned")
    return random_model(small_args(**sizes, **request.param))


def inputs_of(model: DiTTTSModel) -> dict:
    """Of the samples in rows of their own, with numbers in the padding."""
    inputs = padded_inputs(model.args, FRAMES, TEXT, SPEAKER)
    inputs["text_ids"] = 1 + inputs["text_ids"] % 19
    if model.args.max_caption_tokens:
        ids = torch.randint(256, (5, 4), generator=torch.Generator().manual_seed(1))
        inputs |= {
            "caption_ids": ids,
            "caption_mask": valid_mask(CAPTIONS, 4),
            "keep_caption": KEEP_CAPTION,
        }
    return inputs | {"keep_text": KEEP_TEXT, "keep_speaker": KEEP_SPEAKER}


def packed_inputs(padded: dict, order=(0, 1, 2, 3, 4)) -> dict:
    """`order`: of the samples in `padded`."""
    frames, text, speaker = ([lengths[n] for n in order] for lengths in (FRAMES, TEXT, SPEAKER))
    kinds = {"latents": frames, "frame_mask": frames, "speaker": speaker, "speaker_mask": speaker}
    kinds |= dict.fromkeys(("text_ids", "text_mask", "text_positions"), text)
    wide = {"speaker": (28, 4), "speaker_mask": (28, 4), "latents": (32, 1), "frame_mask": (32, 1)}
    found = dict(padded)
    for name, lengths in kinds.items():
        value = torch.nn.functional.pad(
            padded[name], (0, 0) * (padded[name].dim() - 2) + (0, 3)
        )  # so that 13 frames can have 4 patches
        found[name] = in_one_row(value, lengths, *wide.get(name, (14, 1)))
    captions = stream_of(torch.full((5,), 4), 20, 4) if "caption_ids" in padded else None
    packed = streams(frames, text, speaker, SIZES, LONGEST)
    return found | {"packed": packed._replace(captions=captions)}


def outcome(model: DiTTTSModel, inputs: dict) -> list[torch.Tensor]:
    """Outputs at valid frames, sample by sample, and the gradients of a loss on all of them."""
    model.zero_grad()
    valid = inputs["frame_mask"]
    prediction = model(**inputs)[valid]
    draw = torch.Generator().manual_seed(3)
    (prediction * torch.randn(prediction.shape, generator=draw)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [prediction.detach(), *gradients]


@pytest.mark.parametrize("kernels", (True, False), ids=("cpu kernels", "definitions"))
@pytest.mark.parametrize("tail", (0.0, 9.0), ids=("zeros behind", "values behind"))
def test_outputs_and_gradients_are_those_of_padded_samples(model, kernels, tail):
    if kernels:
        use_operations(model)
    padded = inputs_of(model)
    expected = outcome(model, padded)
    packed = packed_inputs(padded)
    packed["latents"] = packed["latents"] + tail * ~packed["frame_mask"][..., None]
    found = outcome(model, packed)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - theirs).norm() <= 2e-4 * theirs.norm()  # small gradients: 2e-5 on some CPUs


def test_the_last_patch_of_a_sample_has_the_frames_that_there_are():
    where = streams(FRAMES, TEXT, SPEAKER, SIZES, LONGEST)
    batch = {"packed": where, "speaker": torch.zeros(1, 28, 6), "text_ids": torch.zeros(1, 14)}
    batch |= {"speaker_frames": torch.tensor(SPEAKER), "text_rows": None, "text_positions": None}
    found = condition_inputs(batch)
    wanted = [1] * 6 + [0] * 2 + [1] * 13 + [0] * 3 + [1] * 4
    assert found["speaker_mask"].int().tolist() == [wanted]
    assert found["text_mask"].int().tolist() == [[1] * sum(TEXT) + [0] * 2]


def test_one_graph_for_batches_of_any_composition(model):
    padded = inputs_of(model)
    expected = outcome(model, padded)
    counter = CompileCounterWithBackend("aot_eager")
    apply_compile(model, counter, 1, components=("model", "encoders"))
    packed = packed_inputs(padded)
    other = padded | {"keep_text": ~KEEP_TEXT}
    order = [3, 0, 4, 1, 2]
    outcome(model, packed_inputs({name: value[order] for name, value in other.items()}, order))
    for mine, theirs in zip(outcome(model, packed), expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    encoders = model.speaker_encoder, model.caption_encoder
    assert counter.frame_count == 2 + sum(each is not None for each in encoders)


@pytest.mark.parametrize("causal", (False, True))
def test_gradients_of_attention_within_samples(causal):
    """One sample has no queries, one no text; keys behind the last sample are of none."""
    q, k, v = (torch.randn(n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (9, 14, 14))
    starts = torch.tensor([0, 4, 4, 8], dtype=torch.int32)
    key_starts = starts if causal else torch.tensor([0, 6, 9, 13], dtype=torch.int32)
    window = (-1, 0 if causal else -1)

    def attend(q, k, v):
        return packed_attention(q, k, v, starts, key_starts, 4, 6, window_size=window)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    out = attend(q, k, v)
    scores = torch.einsum("qhd,khd->hqk", q[4:8], k[4:8] if causal else k[9:13]) / 3**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    values = v[4:8] if causal else v[9:13]
    torch.testing.assert_close(out[4:8], torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    assert not out[8:].any()
