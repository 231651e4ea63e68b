"""DAC-VAE weights on disk: the released layout, exports, corruption, names, preparation."""

import json
import math
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.sentences import refused
from tests.helpers.speech_corpora import AS_IS, prepare, write_tones
from tools.harness.dac_vae_checkpoints import (
    RELEASED,
    RELEASED_PARAMETERS,
    RELEASED_WATERMARK,
    TINY,
    layout,
    write_tiny_dac_vae,
)
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.dac_vae import DacVaeCodec
from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import (
    match_names,
    read_sizes,
    write_safetensors,
)

NORMED = "decoder.model.2.block.1"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_tiny_dac_vae(tmp_path_factory.mktemp("dac_vae"))


@pytest.fixture(scope="module")
def codec(file) -> DacVaeCodec:
    return build_codec(str(file))


def changed(file: Path, path: Path, change) -> Path:
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, path)
    return path


def test_released_layout_is_covered_key_by_key():
    """Shapes only: all of the released model's 107,671,171 parameters have their place."""
    shapes = layout(RELEASED, RELEASED_WATERMARK)
    assert sum(map(math.prod, shapes.values())) == RELEASED_PARAMETERS
    # All but what adds the watermark.
    stored = {
        name.replace("weight_v", "weight"): torch.empty(shape, device="meta")
        for name, shape in layout(RELEASED, None).items()
        if not name.endswith("weight_g")
    }
    sizes = read_sizes(Path("weights.pth"), stored, {"sample_rate": 48_000})
    assert (sizes.hop_length, sizes.feature_dim, sizes.latent_channels) == (1920, 1024, 128)
    matched = match_names(Path("weights.pth"), stored, sizes)
    assert set(matched.values()) == set(stored)


def test_one_fingerprint_for_the_same_weights_and_another_for_others(file, codec, tmp_path):
    def other_watermark(content):
        for name, tensor in content["state_dict"].items():
            if name not in layout(TINY, None):
                tensor += 1

    def weight(content):
        content["state_dict"][f"{NORMED}.weight_g"][0] *= 1.001

    bare = tmp_path / "bare.safetensors"
    stored = torch.load(file, weights_only=True)["state_dict"]
    save_file(stored, bare)  # hop 1920, hence the released rate
    waveform = torch.sin(torch.arange(5000) * 0.05)
    latents = codec.encode(waveform)
    for path in (
        changed(file, tmp_path / "watermark.pth", other_watermark),
        bare,
    ):
        other = build_codec(str(path))
        assert other.fingerprint == codec.fingerprint
        assert torch.equal(other.encode(waveform), latents)
        assert torch.equal(other.decode(latents), codec.decode(latents))
    for change in (state(sample_rate=44_100), weight):
        other = build_codec(str(changed(file, tmp_path / "changed.pth", change)))
        assert other.fingerprint != codec.fingerprint
    save_file(stored, bare, {"kwargs": json.dumps({"sample_rate": 24_000})})
    assert build_codec(str(bare)).sample_rate == 24_000


def test_names(file, codec, tmp_path, monkeypatch):
    """A path is good from any folder; a hub name is downloaded."""
    monkeypatch.chdir(file.parent)
    relative = build_codec("weights.pth")
    monkeypatch.chdir(tmp_path)
    assert relative.name == codec.name == str(file)
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a: asked.append(a) or str(file))
    found = build_codec("someone/dac.vae-48k")
    assert asked == [("someone/dac.vae-48k", "weights.pth")]
    assert found.name == "someone/dac.vae-48k" and found.fingerprint == codec.fingerprint

    def fail(*_):
        raise OSError("no network\nmore")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    refused(lambda: build_codec("someone/x"), "someone/x", "no network); download it elsewhere")

    for name in (tmp_path, tmp_path / "none.pth", "https://a/b"):
        refused(lambda: build_codec(str(name)), f"codec = {name}", "known are: mel_dct")


def drop(*names):
    return lambda content: [content["state_dict"].pop(name) for name in names]


def put(name, value):
    return lambda content: content["state_dict"].update({name: value})


def state(**kwargs):
    return lambda content: content["metadata"]["kwargs"].update(kwargs)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            drop(f"{NORMED}.weight_v"),
            f"{NORMED}.weight is missing, {NORMED}.weight_g is unexpected",
        ),
        (put(f"{NORMED}.bias", torch.zeros(7)), f"{NORMED}.bias has the shape (7,), not (24,)"),
        (put("encoder.block.5.alpha", torch.full((1, 64, 1), torch.nan)), "not finite"),
        (state(sample_rate="fast"), "sample_rate = 'fast'"),
        (drop("quantizer.out_proj.weight_v"), "is no DAC-VAE: it lacks quantizer.out_proj.weight"),
        (lambda content: content.pop("state_dict"), "lacks 'state_dict'"),
        (put("encoder.block.1.block.4.weight_v", torch.ones(8, 4, 3)), "strides [1, 8, 10, 12"),
    ],
)
def test_corrupt_checkpoints(file, tmp_path, change, sentence):
    path = changed(file, tmp_path / "changed.pth", change)
    refused(lambda: build_codec(str(path)), sentence)


def test_no_file_is_taken_for_weights_and_none_is_executed(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"state_dict": {}, "metadata": Fraction(1, 2)}, path)
    refused(lambda: build_codec(str(path)), "could run code")
    for other in (path, tmp_path / "weights.safetensors"):
        other.write_bytes(pickle.dumps([1, 2]))
        refused(lambda: build_codec(str(other)), str(other))


@pytest.mark.long
def test_prepares_and_knows_moved_weights_again(file, codec, tmp_path):
    source = write_tones(tmp_path / "in", "ab", speaker="s")

    def prepared(weights):
        return prepare(source, tmp_path / "out", codec=str(weights), audio=AS_IS)

    settings = prepared(file)["settings"]
    assert (settings["codec"], settings["codec_fingerprint"]) == ("dac_vae", codec.fingerprint)
    # Weights are recognized in another file, and others are refused.
    write_safetensors(codec.network, tmp_path / "elsewhere.safetensors")
    assert prepared(tmp_path / "elsewhere.safetensors")["reused"]
    other = write_tiny_dac_vae(tmp_path, seed=1)
    refused(lambda: prepared(other), "codec_fingerprint was")
