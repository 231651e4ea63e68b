"""The DAC-VAE codec against its definition written out: values, edges, portions, precision."""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.sentences import refused
from tools.harness.dac_vae_checkpoints import (
    TINY,
    TINY_WATERMARK,
    Kwargs,
    layout,
    write_dac_vae,
    write_tiny_dac_vae,
)
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.codec.dac_vae import DacVaeCodec, load_dac_vae
from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import write_safetensors

HOP = 1920
TOLERANCE = 1e-5
"""Twenty times what is left of values below 5 where a codec computes in float64 and gives float32"""


def weight(state: dict[str, Tensor], name: str) -> Tensor:
    g, v = state[f"{name}.weight_g"], state[f"{name}.weight_v"]
    return g * v / (v * v).sum(dim=(1, 2), keepdim=True).sqrt()


def conv(state: dict[str, Tensor], name: str, x: Tensor, padding: int, **how: int) -> Tensor:
    return F.conv1d(x, weight(state, name), state[f"{name}.bias"], padding=padding, **how)


def snake(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    alpha = state[f"{name}.alpha"]
    return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)


def residual(state: dict[str, Tensor], name: str, x: Tensor, dilation: int) -> Tensor:
    y = snake(state, f"{name}.block.0", x)
    y = conv(state, f"{name}.block.1", y, padding=3 * dilation, dilation=dilation)
    y = snake(state, f"{name}.block.2", y)
    return x + conv(state, f"{name}.block.3", y, padding=0)


def defined_mean(state: dict[str, Tensor], waveform: Tensor, kwargs: Kwargs = TINY) -> Tensor:
    """Posterior mean (T, 128) of a waveform of whole frames."""
    x = conv(state, "encoder.block.0", waveform[None, None], padding=3)
    for number, stride in enumerate(kwargs.encoder_rates, start=1):
        block = f"encoder.block.{number}.block"
        for unit, dilation in enumerate((1, 3, 9)):
            x = residual(state, f"{block}.{unit}", x, dilation)
        x = snake(state, f"{block}.3", x)
        x = conv(state, f"{block}.4", x, padding=stride // 2, stride=stride)
    last = len(kwargs.encoder_rates) + 1
    x = snake(state, f"encoder.block.{last}", x)
    x = conv(state, f"encoder.block.{last + 1}", x, padding=1)
    x = conv(state, "quantizer.in_proj", x, padding=0)
    return x[0, : kwargs.codebook_dim].T


def defined_waveform(state: dict[str, Tensor], latents: Tensor, kwargs: Kwargs = TINY) -> Tensor:
    """Waveform (T * hop,) of latents (T, 128), without a watermark."""
    x = conv(state, "quantizer.out_proj", latents.T[None], padding=0)
    x = conv(state, "decoder.model.0", x, padding=3)
    for number, stride in enumerate(kwargs.decoder_rates, start=1):
        block = f"decoder.model.{number}.block"
        x = snake(state, f"{block}.0", x)
        x = F.conv_transpose1d(
            x, weight(state, f"{block}.1"), state[f"{block}.1.bias"], stride, padding=stride // 2
        )
        for place, dilation in ((4, 1), (5, 3), (8, 9)):
            x = residual(state, f"{block}.{place}", x, dilation)
    x = snake(state, "decoder.wm_model.encoder_block.pre.0", x)
    return torch.tanh(conv(state, "decoder.wm_model.encoder_block.pre.1", x, padding=3))[0, 0]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_tiny_dac_vae(tmp_path_factory.mktemp("dac_vae"))


def in_float64(codec: DacVaeCodec) -> DacVaeCodec:
    """Its rounding hides no small errors, nor does it depend on the processor's kernels."""
    network = codec.network.double()
    codec.network = SimpleNamespace(
        encode=lambda waveforms: network.encode(waveforms.double()),
        decode=lambda latents: network.decode(latents.double()),
    )
    return codec


@pytest.fixture(scope="module")
def codec(file) -> DacVaeCodec:
    return load_dac_vae(str(file), chunk_seconds=60)


@pytest.fixture(scope="module")
def exact(file) -> DacVaeCodec:
    return in_float64(load_dac_vae(str(file), chunk_seconds=60))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_in_float64(path: Path) -> dict[str, Tensor]:
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: value.double() for name, value in state.items()}


def difference(first: Tensor, second: Tensor) -> float:
    assert first.shape == second.shape
    return float((first - second).abs().max())


_RATES = {"encoder_rates": (4, 6), "decoder_rates": (6, 4), "sample_rate": 600}
OTHER_SIZES = Kwargs(encoder_dim=6, latent_dim=20, decoder_dim=32, codebook_dim=5, **_RATES)


@pytest.mark.parametrize(
    "kwargs, watermark",
    [(TINY, TINY_WATERMARK), (TINY, None), (OTHER_SIZES, None)],
    ids=["watermark", "plain", "other sizes"],
)
def test_mean_and_waveform_are_as_defined(tmp_path, kwargs, watermark):
    """Also of another number of strides, and of features that are not the encoder's last width."""
    path = write_dac_vae(tmp_path / "weights.pth", kwargs, watermark, seed=2)
    state, codec = weights_in_float64(path), build_codec(str(path))
    write_safetensors(codec.network, tmp_path / "export.safetensors")
    exported = build_codec(str(tmp_path / "export.safetensors"))
    assert (exported.fingerprint, exported.sample_rate) == (codec.fingerprint, kwargs.sample_rate)
    assert (codec.sample_rate, codec.latent_channels) == (kwargs.sample_rate, kwargs.codebook_dim)

    waveform = noise(9 * math.prod(kwargs.encoder_rates), seed=1)
    mean = defined_mean(state, waveform.double(), kwargs)
    latents = codec.encode(waveform)
    assert len(latents) == 9 and mean.std() > 0.1
    expected = defined_waveform(state, latents.double(), kwargs)
    assert 0.02 < expected.std() < 0.7  # neither silent nor all at the ends of tanh
    exact = in_float64(codec)
    assert difference(exact.encode(waveform), mean) < TOLERANCE
    assert difference(exact.decode(latents), expected) < TOLERANCE


def test_the_fingerprint_stays(tmp_path):
    """Of weights that every machine makes to the bit. Whoever changes what the latents are changes it with them."""
    state = {}
    for number, (name, shape) in enumerate(layout(OTHER_SIZES, None).items()):
        values = ((torch.arange(math.prod(shape)) * 37 + number * 11) % 61 - 30) / 32
        if name.endswith("alpha"):
            values = values.abs() + 0.5
        elif name.endswith("weight_g"):
            values = values.abs() / 4 + 0.75
        elif name.endswith("bias"):
            values = values / 8
        state[name] = values.view(shape)
    path = tmp_path / "weights.pth"
    torch.save({"state_dict": state, "metadata": {"kwargs": asdict(OTHER_SIZES)}}, path)
    assert build_codec(str(path)).fingerprint == "7444cf76658e9d10"


def test_mirrors_the_end_to_whole_frames_and_pads_no_further(exact):
    waveform = noise(20 * HOP - 700)
    latents = exact.encode(waveform)
    mirrored = torch.cat([waveform, waveform[-701:-1].flip(0)])
    assert torch.equal(latents, exact.encode(mirrored))
    # Zeros would make other frames of the end.
    assert difference(latents[19:], exact.encode(F.pad(waveform, (0, 700)))[19:]) > 0.01
    assert isinstance(exact, Codec)
    refused(lambda: exact.encode(torch.full((HOP,), torch.nan)), "waveforms have shape")
    refused(lambda: exact.decode(torch.zeros(3, 64)), "latents have shape")


@pytest.mark.parametrize("samples", [1, HOP // 2, HOP // 2 + 1, 3 * HOP])
def test_whole_frames_are_what_encode_makes_of_a_waveform(codec, samples):
    waveforms = torch.stack([noise(samples, seed=seed) for seed in range(2)])
    whole = codec.to_whole_frames(waveforms)
    assert whole.shape == (2, -(-samples // HOP) * HOP)
    mode = "reflect" if samples > HOP // 2 else "constant"  # what is too short to be mirrored
    assert torch.equal(whole, F.pad(waveforms, (0, whole.shape[1] - samples), mode))
    latents = codec.encode_batch(waveforms)
    assert torch.equal(latents, codec.encode_batch(whole))
    assert latents.shape == (2, whole.shape[1] // HOP, 128) and latents.dtype == torch.float32


@pytest.mark.long
@pytest.mark.parametrize("rows, frames", [(1, 11), (3, 4), (3, 47)])
def test_portions_of_bounded_size_join_without_seams(exact, file, rows, frames):
    """One row, rows together and rows that are cut, at most 10 frames at once beside their context."""
    waveforms = torch.stack([noise(frames * HOP - 5, seed=seed) for seed in range(rows)])
    latents = exact.encode_batch(waveforms)
    assert difference(torch.stack([exact.encode(one) for one in waveforms]), latents) < TOLERANCE
    in_portions, sizes = in_float64(load_dac_vae(str(file), chunk_seconds=0.4)), []
    run = in_portions.network.encode
    in_portions.network.encode = lambda given: sizes.append(given.shape) or run(given)
    assert difference(in_portions.encode_batch(waveforms), latents) < TOLERANCE
    context = in_portions.encoder_context
    assert len(sizes) > 1
    for count, samples in sizes:
        own = samples // HOP - (context.before + context.after if frames > 10 else 0)
        assert count * own <= 10 and samples <= frames * HOP
    decoded = torch.stack([in_portions.decode(each) for each in latents])
    assert difference(decoded, torch.stack([exact.decode(each) for each in latents])) < TOLERANCE


def test_float32_under_autocast_and_lower_precision(codec, monkeypatch):
    waveform, latents = noise(5 * HOP), 3 * noise(5, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(codec.encode(waveform), codec.encode(waveform.double()))
        under = codec.encode(waveform), codec.decode(latents)
        rounded = codec.network.encode(waveform[None]).float()[0]
    for one, other in zip(under, (codec.encode(waveform), codec.decode(latents)), strict=True):
        assert torch.equal(one, other)
    assert difference(rounded, under[0]) > 1e-3  # what autocast would have done
    backends = (torch.backends.cudnn.conv, torch.backends.mkldnn.conv)
    before = [backend.fp32_precision for backend in backends]
    inside, run = [], codec.network.encode

    def spy(waveforms: Tensor) -> Tensor:
        inside.append([backend.fp32_precision for backend in backends])
        return run(waveforms)

    monkeypatch.setattr(codec.network, "encode", spy)
    codec.encode(noise(HOP))  # no TF32
    assert inside == [["ieee", "ieee"]]
    assert [backend.fp32_precision for backend in backends] == before
