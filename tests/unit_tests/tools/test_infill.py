"""The in-fill model of benchmarks/time_to_quality.py: size, spans, prompts, guidance."""

import pytest
import torch

from benchmarks.quality.infill_model import InfillModel, characters
from benchmarks.quality.infill_task import (
    MIN_MASKED,
    Prompted,
    dropped,
    fill_in,
    masked_spans,
)
from tests.helpers.tokens import byte_tokenizer
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.speech.sampling.sampler import SAMPLING_STREAM, SpeechRequest


def _args():
    args = model_flavors()["debug"]
    args.text_vocab_size, args.text_n_layers, args.text_n_heads = 259, 2, 2
    return args


def test_spans_are_contiguous_and_most_of_the_frames():
    frames = torch.arange(1, 201)
    row = torch.arange(200)
    spans = masked_spans(frames, 200, 3, torch.tensor(5), row)
    counts = spans.sum(1)
    assert (counts >= (MIN_MASKED * frames - 0.5)).all() and (counts <= frames).all()
    assert counts.min() >= 1
    edges = spans.int().diff(dim=1, prepend=torch.zeros(200, 1), append=torch.zeros(200, 1))
    assert (edges == 1).sum(1).eq(1).all()
    inside = torch.arange(200) < frames[:, None]
    assert not (spans & ~inside).any()
    assert not torch.equal(spans, masked_spans(frames, 200, 3, torch.tensor(6), row))
    assert 0.8 < (counts / frames).mean() < 0.9  # of 0.7 to 1


def test_dropping_the_text_drops_the_given_frames_too():
    keep_given, keep_text = dropped(0, torch.tensor(0), torch.arange(20000))
    assert not (keep_given & ~keep_text).any()
    assert keep_text.float().mean() == pytest.approx(0.8, abs=0.02)
    assert keep_given.float().mean() == pytest.approx(0.8 * 0.7, abs=0.02)


def _small_infill():
    torch.manual_seed(0)
    model = InfillModel(_args()).eval()
    model.init_weights()
    for parameter in model.parameters():  # AdaLN and the output start at zero
        torch.nn.init.normal_(parameter, std=0.05)
    return model


def _prompted():
    ids = characters(torch.tensor([byte_tokenizer().encode("one two")]))
    return Prompted(torch.randn(1, 6, 128), torch.tensor([5]), ids)


def test_a_row_does_not_depend_on_its_padding():
    model, prompts = _small_infill(), _prompted()
    mask = torch.ones(1, 9, dtype=torch.bool)
    rows = prompts.rows(torch.randn(1, 9, 128), mask)
    assert rows.latents.shape[1] == 14 and rows.mask.all()
    given, t = prompts.given(14), torch.tensor([0.7])
    alone = model(rows.latents, t, rows.mask, given, rows.ids)

    def padded(x):
        return torch.nn.functional.pad(x, (0, 0, 0, 7))

    longer = torch.nn.functional.pad(rows.mask, (0, 7))
    output = model(padded(rows.latents), t, longer, padded(given), rows.ids)
    assert torch.allclose(output[:, :14], alone, atol=1e-5)
    assert alone.abs().max() > 1e-3


def test_utterances_stand_behind_their_references_and_come_back():
    prompts = _prompted()
    text_ids = torch.tensor([[*byte_tokenizer().encode("ab"), 0]])  # begin and end go
    assert characters(text_ids).tolist() == [[ord("a") + 3, ord("b") + 3, 0, 0]]
    latents = torch.randn(1, 9, 128)
    rows = prompts.rows(latents, torch.arange(9)[None] < 7)
    assert int(rows.mask.sum()) == 12
    assert torch.equal(rows.latents[0, :5], prompts.reference[0, :5])
    assert torch.equal(prompts.behind(rows.latents, 7)[0], latents[0, :7])
    given = prompts.given(rows.latents.shape[1])
    assert torch.equal(given[0, :5], prompts.reference[0, :5]) and not given[0, 5:].any()


def test_sampling_is_of_a_request_whatever_its_batch():
    model = _small_infill()
    requests = [
        SpeechRequest("one", torch.randn(4, 128), 6),
        SpeechRequest("two", torch.randn(7, 128), 9),
    ]
    encode = byte_tokenizer().encode
    ids = characters(torch.tensor([encode("six one"), encode("six two")]))
    references = torch.nn.utils.rnn.pad_sequence([r.reference for r in requests], batch_first=True)
    both = Prompted(references, torch.tensor([4, 7]), ids)
    one = Prompted(requests[0].reference[None], torch.tensor([4]), ids[:1])
    cpu = torch.device("cpu")
    found = fill_in(model, both, requests, 0, cpu)
    assert [len(each) for each in found] == [6, 9]
    assert torch.allclose(found[0], fill_in(model, one, requests[:1], 0, cpu)[0], atol=1e-4)


class _Constant:
    """Velocity 5 with text and prompt, 2 without both."""

    args = _args()

    def __call__(self, noisy, t, frame_mask, given, ids, keep_text):
        assert given[keep_text].any() and not given[~keep_text].any()
        return torch.where(keep_text, 5.0, 2.0)[:, None, None].expand_as(noisy)


def test_guidance_leads_away_from_what_is_said_without_text_and_prompt():
    prompts = _prompted()
    request = SpeechRequest("two", prompts.reference[0, :5], 9)
    [one] = fill_in(_Constant(), prompts, [request], 0, torch.device("cpu"))
    noise = stream_keys(0, torch.tensor(0), torch.tensor([request.noise_row()]), SAMPLING_STREAM)
    expected = normal(noise, (14, 128))[0, 5:] - (5 + 2 * (5 - 2))
    assert torch.allclose(one, expected, atol=1e-4)
