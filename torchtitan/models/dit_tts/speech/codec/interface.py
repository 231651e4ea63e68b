"""The `Codec` protocol, and the checks that all codecs share."""

import os
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torchtitan.models.dit_tts.config.codec_name import STATISTICS_NAME, split_vocoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.factories import is_factory

if TYPE_CHECKING:  # commands import this package, and torch takes seconds
    from torch import Tensor

WITHOUT_WEIGHTS = ("mel_dct",)
"""Codecs that need no weights; the name of one is its kind"""

OWN = "module:factory"
"""kind of a codec that a user's function makes; it has the form of such a name, whose kind it is"""


@runtime_checkable
class Codec(Protocol):
    """A codec, by inheritance or with the same members; latents are float32 with a std of about one."""

    name: str
    sample_rate: int  # Hz, of the waveforms that go in and come out
    hop_length: int  # samples per latent frame
    latent_channels: int  # such as 128
    fingerprint: str  # digest of all constants that change the latents; differs -> encode again

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.hop_length

    def to_whole_frames(self, waveforms: "Tensor") -> "Tensor":
        """Waveforms (..., samples) -> (..., T * hop_length), T = ceil(samples / hop_length).

        Appends what `encode` appends, so that recordings of different length and equal T can go
        through `encode_batch` together: a waveform's latents are those of its whole frames.
        """
        ...

    def encode(self, waveform: "Tensor") -> "Tensor":
        """Waveform (samples,) float32 in [-1, 1] -> latents (T, 128), T = ceil(samples / hop_length)."""
        return self.encode_batch(waveform[None])[0]

    def encode_batch(self, waveforms: "Tensor") -> "Tensor":
        """Waveforms (B, samples) of equal length -> latents (B, T, 128), each as `encode` gives it.

        They are padded to whole frames and no further, as by `encode`: shorter recordings padded to
        the length of a longer one would have other latents near their end.
        """
        ...

    def decode(self, latents: "Tensor") -> "Tensor":
        """Latents (T, 128) -> waveform (T * hop_length,) float32 in [-1, 1]."""
        ...


def check_waveforms(waveforms: "Tensor") -> None:
    """Raises InputError where a batch to encode is not (B, samples) of finite samples."""
    if waveforms.ndim != 2 or waveforms.numel() == 0 or not waveforms.isfinite().all():
        raise InputError(
            f"waveforms have shape {tuple(waveforms.shape)}; encode finite samples in [-1, 1] of shape "
            "(B, samples), or (samples,) alone"
        )


def check_latents(latents: "Tensor", channels: int) -> None:
    """Raises InputError where what is to decode is not (T, channels) of finite values."""
    shape = tuple(latents.shape)
    if len(shape) != 2 or shape[1] != channels or 0 in shape or not latents.isfinite().all():
        raise InputError(
            f"latents have shape {shape}; decode finite values of shape (T, {channels})"
        )


def codec_kind(name: str) -> str:
    """The kind of the codec called `name`, wherever its weights are: one of WITHOUT_WEIGHTS, OWN, or dac_vae."""
    name = split_vocoder(name)[0]
    if name in WITHOUT_WEIGHTS:
        return name
    if not name or (is_factory(name) and not os.path.exists(name)):
        return OWN
    return "mel_dct" if name.rpartition("/")[2] == STATISTICS_NAME else "dac_vae"
