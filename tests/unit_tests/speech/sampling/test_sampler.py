"""Sampling with a model that tells rows, conditions, keep flags and times apart."""

import hashlib
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.helpers.row_model import RowModel, moved
from tests.helpers.small_models import random_model, small_args
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.flow.solvers import schedule_times
from torchtitan.models.dit_tts.infra.compile import compile_for_any_lengths
from torchtitan.models.dit_tts.model.attention_backends import guided_keys
from torchtitan.models.dit_tts.speech.sampling.sampler import (
    SpeechRequest,
    generate_latents,
)
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

TOKENIZER = UnitTokenizer(make_vocabulary("bytes", "", ["speaker"], {"speaker": ["ann", "bob"]}))
BEGIN, END, UNKNOWN_SPEAKER, ANN, BOB = 1, 2, 259, 260, 261
SAMPLING = Sampling(steps=4, text_scale=2.0, speaker_scale=3.0, min_t=0.5)


def reference(*values: float) -> torch.Tensor:
    """(R, C) whose first channel has these values."""
    return torch.tensor(values, dtype=torch.float16)[:, None].repeat(1, 8)


REQUESTS = [
    SpeechRequest("ab", reference(0.5, 2.0, 4.0), 5, {"speaker": "bob"}),
    SpeechRequest("zebra", reference(7.0), 3, {"speaker": "ann"}),
    SpeechRequest("c", reference(0.25, 0.125), 4),
]
IDS = [
    [BEGIN, BOB, *(ord(letter) + 3 for letter in "ab"), END],
    [BEGIN, ANN, *(ord(letter) + 3 for letter in "zebra"), END],
    [BEGIN, UNKNOWN_SPEAKER, ord("c") + 3, END],
]


def generate(
    requests,
    sampling=SAMPLING,
    seed=0,
    model=RowModel(),
    objective=FlowMatching(),
    tokenizer=TOKENIZER,
    **more,
):
    given = model, tokenizer, objective, requests, sampling, seed, torch.device("cpu")
    return generate_latents(*given, **more)


class Constant(RowModel):
    """Answers the same number everywhere."""

    def __init__(self, value: float):
        self.value = value

    def denoise_guided(self, latents, *args):
        return torch.full_like(latents, self.value)


def noise_of(requests, seed=0):
    """The noise that sampling starts from: where nothing moves it."""
    return generate(requests, seed=seed, model=Constant(0.0))


@pytest.mark.parametrize(
    "settings, text_gain, speaker_gain, mean_time",
    [
        ({"text_scale": 0.0, "speaker_scale": 0.0}, 1.0, 1.0, 2.5 / 4),
        ({}, 1 + 2 * 2 / 4, 1 + 3 * 2 / 4, 2.5 / 4),  # at t = 1 and 3/4 of four steps
        ({"speaker_scale": 0.0, "min_t": 0.0}, 3.0, 1.0, 2.5 / 4),
        ({"text_scale": 0.0, "min_t": 0.9}, 1.0, 1 + 3 / 4, 2.5 / 4),
        ({"guidance": "alternating"}, 1 + 2 / 4, 1 + 3 / 4, 2.5 / 4),
        ({"guidance": "joint", "speaker_scale": 2.0}, 1 + 2 * 2 / 4, 1 + 2 * 2 / 4, 2.5 / 4),
        ({"solver": "midpoint"}, 1 + 2 / 2, 1 + 3 / 2, 2 / 4),
        ({"solver": "heun"}, 1 + 2 / 2, 1 + 3 / 2, 2 / 4),
        ({"truncation_factor": 0.5}, 1 + 2 * 2 / 4, 1 + 3 * 2 / 4, 2.5 / 4),
    ],
)
def test_each_row_is_made_of_its_own_request(settings, text_gain, speaker_gain, mean_time):
    found = generate(REQUESTS, replace(SAMPLING, **settings))
    scale = settings.get("truncation_factor", 1.0)
    noise = [scale * each for each in noise_of(REQUESTS)]
    for number, request in enumerate(REQUESTS):
        way = moved(
            IDS[number], request.reference, request.frames, text_gain, speaker_gain, mean_time
        )
        assert found[number].shape == (request.frames, 8)
        assert found[number].dtype == torch.float32 and found[number].device.type == "cpu"
        expected = noise[number].double() - way.double()
        torch.testing.assert_close(found[number].double(), expected, atol=2e-3, rtol=1e-5)


def test_features_of_a_text_encoder_take_the_place_of_the_ids():
    """It sees text alone: neither padding nor the ids of conditioning tokens."""
    seen = []

    def text_encoder(ids, mask):
        seen.append((ids, mask))
        return ids[..., None].float() / 2

    found = generate(REQUESTS, text_encoder=text_encoder)
    [(ids, mask)] = seen  # once for all steps
    for number, request in enumerate(REQUESTS):
        own = IDS[number]
        assert ids[number, : len(own)].tolist() == own
        valid = mask[number].tolist()
        assert valid == [i < len(own) and i != 1 for i in range(ids.shape[1])]
        way = moved([i / 2 for i in own], request.reference, request.frames, 2.0, 2.5, 2.5 / 4)
        expected = noise_of(REQUESTS)[number] - way
        torch.testing.assert_close(found[number], expected, atol=2e-3, rtol=1e-5)


def test_noise_is_keyed_by_seed_and_request():
    """By text and speaker, not by length or reference: SHA-256 of their JSON, 7 bytes."""
    plain = SpeechRequest("a", reference(1.0), 300)
    bob = replace(plain, metadata={"speaker": "bob", "mood": "calm"})
    for request, row in (
        (plain, '["a", ""]'),
        (replace(plain, reference=reference(), frames=9, metadata={"mood": "calm"}), '["a", ""]'),
        (bob, '["a", "bob"]'),
    ):
        digest = hashlib.sha256(row.encode()).digest()
        assert request.noise_row() == int.from_bytes(digest[:7], "little")
    first, *others = noise_of([plain, replace(plain, text="b"), bob])
    # With one seed for both, training has other noise.
    row, objective = torch.tensor([plain.noise_row()]), FlowMatching(prediction="noise", seed=0)
    others.append(objective.add_noise(torch.zeros(1, 300, 8), torch.tensor(0), row, 1).target[0])
    assert abs(float(first.mean())) < 0.1 and abs(float(first.std()) - 1) < 0.1
    for other in (*others, noise_of([plain], seed=1)[0]):
        assert (first - other).abs().max() > 1


ODD_HEADS = dict(dim=24, n_heads=3, speaker_patch_size=1)
PARTIAL_PATCHES = dict(speaker_bidirectional=True, speaker_patch_size=3)
CAPTIONS = dict(max_caption_tokens=8, speaker_bidirectional=True)
CASES = [
    ({}, {"rescale_k": 1.5}),
    (CAPTIONS, {"caption_scale": 2.0, "speaker_kv_scale": 1.5}),
    ({}, {"solver": "midpoint"}),
    (ODD_HEADS, {"solver": "heun", "schedule": "sway", "guidance": "alternating"}),
    (
        dict(text_projection=False, speaker_partial_patches=False),  # Echo-TTS
        {"steps": 5, "schedule": "sway", "truncation_factor": 0.9},
    ),
    (
        PARTIAL_PATCHES,
        {"guidance": "joint", "speaker_scale": 2.0, "max_t": 0.9},
    ),
    (
        dict(text_vocab_size=0),  # features from outside
        {"speaker_kv_scale": 1.5, "speaker_kv_min_t": 0.5, "rescale_k": 1.2, "rescale_sigma": 2.0},
    ),
]


@pytest.mark.parametrize(
    "sizes, settings, compiled",
    [
        *((*case, False) for case in CASES),
        *(
            pytest.param(*case, True, marks=pytest.mark.slow)
            for case in CASES
            if case[0] in (ODD_HEADS, PARTIAL_PATCHES, CAPTIONS)
        ),
    ],
    ids=str,
)
def test_each_request_is_said_as_it_is_alone(sizes, settings, compiled):
    """By networks whose rows attend to themselves, in a batch of unequal references, and without caches. Compiled
    blocks mask what eager ones on a CPU leave out."""
    args = small_args(**{"latent_channels": 8, "text_vocab_size": 300, "n_layers": 1} | sizes)
    model, more = random_model(args).eval(), {}
    if not args.text_vocab_size:
        more["text_encoder"] = lambda ids, mask: (
            ids[..., None].float().expand(-1, -1, args.text_dim) / 300
        )
    sampling = replace(SAMPLING, **settings)
    check_sampling(sampling)
    draw = torch.Generator().manual_seed(2)
    requests = [
        SpeechRequest(text, torch.randn(frames, 8, generator=draw), 4 + frames, metadata)
        for text, frames, metadata in (
            ("nine frames", 9, {"caption": "calm and very old"}),
            ("four", 4, {}),
            ("two here", 2, {"caption": "old"}),
            ("none", 0, {"caption": "wild"}),
        )
    ]
    known = torch.randn(3, 8, generator=draw)
    requests[:2] = [replace(requests[0], until=8, known=known), replace(requests[1], until=5)]
    alone = [generate([each], sampling, model=model, **more)[0] for each in requests]
    plain = generate(requests, model=model, **more)
    counter = CompileCounter()
    if compiled:
        compile_for_any_lengths(model, counter)
    found = generate(requests, sampling, model=model, **more)
    graphs = counter.frame_count
    generate(
        [replace(each, frames=each.frames + 9) for each in requests], sampling, model=model, **more
    )
    assert (graphs > 0) == compiled and counter.frame_count == graphs  # none for other lengths
    uncached = generate(requests, sampling, model=model, cache_blocks=False, **more)
    scale = max(float(each.abs().max()) for each in alone)
    for wanted, row, without_caches, other in zip(alone, found, uncached, plain, strict=True):
        torch.testing.assert_close(row, wanted, atol=1e-5 * scale, rtol=0)
        torch.testing.assert_close(without_caches, wanted, atol=1e-5 * scale, rtol=0)
        assert (wanted - other).abs().max() > 1e-3 * scale


@pytest.mark.parametrize("settings", [{}, {"solver": "heun", "start_t": 0.9, "rescale_k": 1.5}])
def test_what_is_known_is_continued(settings):
    """Other frames attend to it, and `until` tells how many of the utterance's frames are made."""
    model = random_model(small_args(latent_channels=8, text_vocab_size=300)).eval()
    request = replace(REQUESTS[0], frames=12)
    known = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    parts = [replace(request, until=7, known=each) for each in known]
    sampling = replace(SAMPLING, **settings)
    first, second, unknown = generate([*parts, replace(request, until=7)], sampling, model=model)
    for found, wanted in zip((first, second), known, strict=True):
        assert found.shape == (7, 8)
        torch.testing.assert_close(found[:3], wanted, atol=1e-5, rtol=0)
    for one, other in ((first, second), (first, unknown)):
        assert (one[3:] - other[3:]).abs().amax(1).min() > 1e-3


def test_a_cpu_computes_no_padded_frame():
    """Of unequal requests; equal ones stay a batch of rows."""
    model, shapes = random_model(small_args(latent_channels=8, text_vocab_size=300)), set()
    hook = lambda layer, given: shapes.add(tuple(given[0].shape[:2]))  # noqa: E731
    model.layers[1].register_forward_pre_hook(hook)
    alike = [REQUESTS[0]] * 2
    # Without guidance, and with both.
    for requests, wanted in ((REQUESTS, {(1, 12), (1, 3 * 12)}), (alike, {(2, 5), (3 * 2, 5)})):
        shapes.clear()
        generate(requests, model=model)
        assert shapes == wanted


@pytest.mark.parametrize("caption", [0, 5])
def test_the_speakers_keys_and_values_are_scaled_alone(caption):
    """A caption's, which stand behind them, are not."""
    lengths = (3, 2, 2, caption) if caption else (3, 2, 2)
    masks = [torch.ones(1, n, dtype=bool) for n in lengths]
    keys = guided_keys(masks, [(True, True, True)], torch.float, 2.0)
    streams, values = ([torch.randn(1, n, 2, 4) for n in (3, 2, 2 + caption)] for _ in "kv")
    by_hand, factor = keys._replace(speaker_scale=None), torch.ones(2 + caption, 1, 1)
    factor[:2] = 2
    scaled = [*streams[:2], factor * streams[2]], [*values[:2], factor * values[2]]
    query = torch.randn(1, 3, 2, 4)
    torch.testing.assert_close(
        keys.attend(query, tuple(streams), tuple(values)), by_hand.attend(query, *scaled)
    )


@pytest.mark.parametrize("start_t", [1.0, 0.999])
@pytest.mark.parametrize("schedule", ["linear", "sway"])
def test_a_noise_prediction_is_read_as_velocity(schedule, start_t):
    """At t = 1, where 1 - t would divide by 0, and next to it, the way to the next evaluation divides."""
    request = SpeechRequest("a", reference(1.0), 3)
    sampling = replace(SAMPLING, schedule=schedule, start_t=start_t)
    noise = FlowMatching(prediction="noise")
    [found] = generate([request], sampling, model=Constant(2.0), objective=noise)
    [x] = noise_of([request])
    x, times = x.double(), schedule_times(sampling)
    for t, end in pairwise(times):
        x = x - (t - end) * (2.0 - x) / (1 - t if t < 0.99 else times[0] - times[1])
    torch.testing.assert_close(found.double(), x, atol=1e-4, rtol=1e-5)
