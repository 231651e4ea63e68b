"""Voices by a small random x-vector model in the hub's layout."""

import shutil

import pytest
import torch
from transformers import AutoFeatureExtractor, WavLMForXVector

from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import noise, write_tiny_wavlm
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_speaker_encoder

pytestmark = pytest.mark.long
RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_wavlm(tmp_path_factory.mktemp("wavlm") / "tiny-sv")


def embedding(folder, waveform):
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    inputs = extractor(waveform.numpy(), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        found = WavLMForXVector.from_pretrained(folder).eval()(**inputs).embeddings[0]
    return torch.nn.functional.normalize(found, dim=0).numpy()


def test_embeddings_are_the_models(folder):
    """At least half a second is heard: a shorter sound is repeated, and no longer one."""
    encoder = open_speaker_encoder(f"xvector:{folder}")
    assert encoder.name == "x-vectors of tiny-sv"
    seconds = {1.5: 1, 0.17: 3, 0.45: 2, 0.6: 1}
    found = encoder.embed([Sound(noise(each), RATE) for each in seconds])
    for vector, (each, times) in zip(found, seconds.items(), strict=True):
        wanted = embedding(folder, noise(each).repeat(times))
        assert vector == pytest.approx(wanted, abs=1e-5), each
    other_rate, nothing, broken = encoder.embed(
        [Sound(noise(1.5), 24_000), Sound(noise(0), RATE), Sound(torch.full((9,), torch.nan), RATE)]
    )
    assert other_rate @ found[0] < 0.9999 and nothing == pytest.approx(broken, abs=1e-5)


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
    [found] = open_speaker_encoder(f"xvector:{old}").embed([Sound(noise(1), RATE)])
    assert found == pytest.approx(embedding(folder, noise(1)), abs=1e-6)

    # Without the head that makes embeddings of speakers: never with a random one.
    headless = shutil.copytree(folder, tmp_path / "headless")
    model.wavlm.save_pretrained(headless)
    words = ("WavLMForXVector are missing", "give a checkpoint")
    refused(lambda: open_speaker_encoder(f"xvector:{headless}"), *words)
    (old / "preprocessor_config.json").unlink()
    refused(lambda: open_speaker_encoder(f"xvector:{old}"), "preprocessor_config.json")
