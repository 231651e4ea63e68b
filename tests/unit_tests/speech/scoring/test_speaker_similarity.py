"""Speaker similarity by a small random x-vector model in the hub's layout, and by the model's own encoder."""

import shutil

import pytest
import torch
from transformers import AutoFeatureExtractor, WavLMForXVector

from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import noise, write_tiny_wavlm
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import (
    open_speaker_encoder,
    open_speaker_scorer,
)

RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_wavlm(tmp_path_factory.mktemp("wavlm") / "tiny-sv")


def embedding(folder, waveform):
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    inputs = extractor(waveform.numpy(), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        return WavLMForXVector.from_pretrained(folder).eval()(**inputs).embeddings[0]


@pytest.mark.long
def test_cosine_of_the_models_embeddings(folder):
    scorer = open_speaker_scorer(f"xvector:{folder}")
    assert scorer.name == "x-vectors of tiny-sv"
    tone = torch.sin(torch.arange(2 * RATE) * 0.05)
    a, b = noise(1.5), tone
    wanted = torch.cosine_similarity(embedding(folder, a), embedding(folder, b), dim=0)
    found = scorer.similarity(Sound(a, RATE), Sound(b, RATE))
    assert found == pytest.approx(float(wanted), abs=1e-5) and found < 0.999
    assert scorer.similarity(Sound(a, RATE), Sound(a, RATE)) == pytest.approx(1.0)
    assert scorer.similarity(Sound(a, RATE), Sound(a, 24_000)) < 0.9999
    # Half a second at least is heard: a shorter sound is repeated, and no longer one.
    for seconds, times in ((0.17, 3), (0.45, 2), (0.6, 1)):
        heard = embedding(folder, noise(seconds).repeat(times))
        wanted = torch.cosine_similarity(heard, embedding(folder, b), dim=0)
        found = scorer.similarity(Sound(noise(seconds), RATE), Sound(b, RATE))
        assert found == pytest.approx(float(wanted), abs=1e-5), seconds
    for short in (noise(0.01), noise(0), torch.full((9,), float("nan"))):
        assert -1 <= scorer.similarity(Sound(short, RATE), Sound(b, RATE)) <= 1


@pytest.mark.long
def test_embeddings_of_several_sounds(folder):
    encoder = open_speaker_encoder(f"xvector:{folder}")
    sounds = [noise(1.5), noise(1.0, 1)]
    found = encoder.embed([Sound(each, RATE) for each in sounds])
    for vector, each in zip(found, sounds, strict=True):
        wanted = torch.nn.functional.normalize(embedding(folder, each), dim=0)
        assert vector == pytest.approx(wanted.numpy(), abs=1e-5)


@pytest.mark.long
def test_checkpoints_of_the_hub_and_others(folder, tmp_path):
    """The hub's are older: one file of torch, other names of the normalized weights, no loss."""
    model = WavLMForXVector.from_pretrained(folder)
    weights = {}
    for key, value in model.state_dict().items():
        for number, old in enumerate(("weight_g", "weight_v")):
            key = key.replace(f"parametrizations.weight.original{number}", old)
        if not key.startswith("objective") and "masked_spec" not in key:
            weights[key] = value
    old = shutil.copytree(folder, tmp_path / "old")
    (old / "model.safetensors").unlink()
    torch.save(weights, old / "pytorch_model.bin")
    sounds = Sound(noise(1), RATE), Sound(torch.sin(torch.arange(RATE) * 0.05), RATE)
    found = [open_speaker_scorer(f"xvector:{each}").similarity(*sounds) for each in (folder, old)]
    assert found[0] == pytest.approx(found[1], abs=1e-6)

    # Without the head that makes embeddings of speakers: never with a random one.
    headless = shutil.copytree(folder, tmp_path / "headless")
    model.wavlm.save_pretrained(headless)
    words = ("WavLMForXVector are missing", "give a checkpoint")
    refused(lambda: open_speaker_scorer(f"xvector:{headless}"), *words)
    (old / "preprocessor_config.json").unlink()
    refused(lambda: open_speaker_scorer(f"xvector:{old}"), "preprocessor_config.json")


def with_latents(*rows):
    return Sound(torch.zeros(8), 4, torch.tensor(rows))


def test_the_models_own_encoder():
    calls = []
    scorer = open_speaker_scorer("own", own=lambda rows: calls.append(rows) or rows.mean(0))
    assert scorer.name == "the model's own speaker encoder, not independent"
    east, north = with_latents([1.0, 0.0]), with_latents([0.0, 2.0], [0.0, 1.0])
    west, broken = with_latents([-3.0, 0.0]), with_latents([float("nan"), 1.0])
    for pair, cosine in (
        ((east, east), 1),
        ((east, north), 0),
        ((west, east), -1),
        ((broken, north), 1),
    ):
        assert scorer.similarity(*pair) == pytest.approx(cosine)
    refused(lambda: scorer.similarity(Sound(torch.zeros(8), 4), east), "this sound has none")

    # A reference is embedded once, by its content.
    calls.clear()
    for _ in range(5):
        scorer.similarity(north, with_latents([1.0, 0.0]))
    assert len(calls) == 5 and len(scorer.references) == 2
