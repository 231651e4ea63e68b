"""A small learned vocoder for mel_dct: log-mel frames -> waveform, 1.95M parameters, in plain torch on the CPU.

    log-mel (F, 80)
      -> ConvNeXt blocks -> pitch and voicing of each frame
      -> a pulse train of that pitch, and white noise      (F * hop,), excitations
      -> ConvNeXt blocks over log-mel and pitch
      -> one complex filter for the pulses, one real filter for the noise, of each frame
      -> sum of the filtered STFTs -> inverse STFT          (F * hop,)

A frame is 10 ms and a filter's bin 25 Hz at each rate: 160 samples and 321 bins at 16 kHz, 240 and 481 at 24 kHz, where the
log-mel bands still end at 8 kHz and the network infers what is above.
Blocks and head are those of Vocos (Siuzdak 2023), the two excitations those of neural source-filter
models (Wang, Takaki, Yamagishi 2019; HiFTNet, Li, Han, Mesgarani 2023): the phase of voiced speech
follows from its pitch, so that a network of this size need not invent it.
recipes/vocoder/train_vocoder.py trains it.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate

from torchtitan.models.dit_tts.bounded import read_weights
from torchtitan.models.dit_tts.config.codec_name import VOCODERS
from torchtitan.models.dit_tts.errors import reading
from torchtitan.models.dit_tts.speech.codec.spectrogram import (
    HOP,
    MEL_BANDS,
    SAMPLE_RATE,
    WINDOW_LENGTH,
    hann_window,
    istft,
    mel_filters,
    stft,
)

LOWEST_PITCH, HIGHEST_PITCH = 50.0, 600.0  # Hz
PITCH_BINS = 128  # equal steps of the logarithm, a third of a semitone
_BINS_PER_OCTAVE = (PITCH_BINS - 1) / math.log2(HIGHEST_PITCH / LOWEST_PITCH)
_PEAK_BINS = 3  # on each side of the likeliest, over which the pitch is averaged
_VOICED = 0.5  # probability
_KERNEL = 7  # frames
_MAX_LOG_GAIN = 6.0  # of an amplitude


class Block(nn.Module):
    """ConvNeXt block (Liu et al. 2022) over frames: (B, F, width) -> the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, _KERNEL, padding=_KERNEL // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.full((width,), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x.mT).mT)
        return x + self.scale * self.down(gelu(self.up(y)))


class Stack(nn.Module):
    """Blocks between an embedding and a head: (B, F, inputs) -> (B, F, outputs)."""

    def __init__(self, inputs: int, width: int, hidden: int, blocks: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Conv1d(inputs, width, _KERNEL, padding=_KERNEL // 2)
        self.first_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(self.embed(x.mT).mT)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last_norm(x))


class Vocoder(nn.Module):
    """Log-mel amplitudes (B, F, 80) -> waveforms (B, F * hop), at `rate` in Hz."""

    window: Tensor
    between_bands: Tensor

    def __init__(self, rate: int = SAMPLE_RATE) -> None:
        super().__init__()
        self.rate, self.hop = rate, HOP * rate // SAMPLE_RATE
        window, mel_bins = WINDOW_LENGTH * rate // SAMPLE_RATE, WINDOW_LENGTH // 2 + 1
        self.bins = window // 2 + 1
        self.pitch = Stack(MEL_BANDS, 96, 256, 4, PITCH_BINS + 1)
        self.filters = Stack(MEL_BANDS + 2, 192, 480, 7, 3 * self.bins)
        with torch.no_grad():  # begins near what the mel bands say
            self.filters.head.weight.mul_(0.1)
        self.register_buffer("window", hann_window(window), persistent=False)
        bands = mel_filters(MEL_BANDS, mel_bins, SAMPLE_RATE)
        bands = bands[:, torch.arange(self.bins).clamp(1, mel_bins - 2)]  # none reaches the ends
        self.register_buffer("between_bands", bands / bands.sum(0), persistent=False)

    def pitch_logits(self, log_mel: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the pitch's bins (B, F, PITCH_BINS) and of being voiced (B, F)."""
        found = self.pitch(_scaled(log_mel)).float()
        return found[..., :-1], found[..., -1]

    def find_pitch(self, log_mel: Tensor) -> tuple[Tensor, Tensor]:
        """Pitch in Hz (B, F), and whether a frame is voiced (B, F)."""
        logits, voiced_logits = self.pitch_logits(log_mel)
        return likeliest_pitch(logits), voiced_logits.sigmoid() > _VOICED

    def log_filters(
        self, log_mel: Tensor, pitch: Tensor, voiced: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log gain of the pulses' filters, their phase in addition to the minimum phase, and log gain of the noise's,
        (B, F, bins) each, of pitch in Hz (B, F) and voiced in [0, 1] (B, F)."""
        about = torch.stack([(pitch / 150).log2() * voiced, voiced], -1)
        given = torch.cat([_scaled(log_mel), about], -1)
        gain, phase, noise_gain = self.filters(given).float().split(self.bins, -1)
        level = log_mel @ self.between_bands
        gain, noise_gain = ((level + each).clamp_max(_MAX_LOG_GAIN) for each in (gain, noise_gain))
        return gain, phase, noise_gain

    def filter_excitations(
        self, log_mel: Tensor, pitch: Tensor, voiced: Tensor, noise: Tensor
    ) -> Tensor:
        """Waveforms (B, F * hop) of pitch in Hz (B, F), voiced in [0, 1] (B, F) and white noise (B, F * hop)."""
        gain, phase, noise_gain = self.log_filters(log_mel, pitch, voiced)
        pulses = pulse_train(pitch, voiced, self.hop, self.rate)
        filters = torch.polar(gain.exp(), phase + minimum_phase(gain))
        spectrum = stft(pulses, self.window, self.hop) * filters
        spectrum = spectrum + stft(noise, self.window, self.hop) * noise_gain.exp()
        return istft(spectrum, self.window, self.hop)

    @torch.no_grad()
    def forward(self, log_mel: Tensor, noise: Tensor | None = None) -> Tensor:
        """Waveform (F * hop,) of log-mel amplitudes (F, mel_bands). `noise`: white, (F * hop,), always the same by default."""
        if noise is None:
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(len(log_mel) * self.hop, generator=generator)
        found, voiced = self.find_pitch(log_mel[None])
        pitch = fill_pitch(found[0], voiced[0])[None]
        return self.filter_excitations(log_mel[None], pitch, voiced.float(), noise[None])[0]


def _scaled(log_mel: Tensor) -> Tensor:
    return (log_mel + 5) / 3  # speech has a mean of about -5 and a deviation of about 3


def minimum_phase(log_gain: Tensor) -> Tensor:
    """Phase (..., bins) of the minimum-phase filter with these log gains, as that of a vocal tract nearly is."""
    cepstrum = torch.fft.irfft(log_gain)
    length = cepstrum.shape[-1]
    folded = cepstrum[..., : length // 2 + 1].clone()
    folded[..., 1:-1] *= 2
    return torch.fft.rfft(folded, n=length).imag


def pitch_bins(pitch: Tensor) -> Tensor:
    """Position of a pitch in Hz among the bins, as a real number."""
    return (pitch / LOWEST_PITCH).log2() * _BINS_PER_OCTAVE


def likeliest_pitch(logits: Tensor) -> Tensor:
    """Pitch in Hz (...) of bins' logits (..., PITCH_BINS): the mean around the likeliest bin."""
    position = torch.arange(PITCH_BINS)
    is_near = (position - logits.argmax(-1, keepdim=True)).abs() <= _PEAK_BINS
    weight = logits.masked_fill(~is_near, -math.inf).softmax(-1)
    return LOWEST_PITCH * 2 ** ((weight * position).sum(-1) / _BINS_PER_OCTAVE)


def fill_pitch(pitch: Tensor, voiced: Tensor) -> Tensor:
    """Pitch (F,) in Hz with straight lines through what is not `voiced` (F,) bool, float32; a constant where nothing is."""
    frames, order = pitch.shape[0], voiced.cumsum(0)
    place = torch.arange(frames)
    # Of the n-th voiced frame, n = 1, 2 ...; ONNX has no shapes that depend on values.
    positions = torch.zeros(frames + 2, dtype=torch.long)
    positions = positions.scatter(0, torch.where(voiced, order, frames + 1), place)
    begin = positions[order.clamp_min(1)]
    end = positions[torch.minimum(order + 1, order[-1])]
    share = (place - begin).double() / (end - begin).clamp_min(1)
    filled = torch.lerp(pitch[begin].double(), pitch[end].double(), share)
    return torch.where(order[-1] > 0, filled, LOWEST_PITCH).float()


def pulse_train(pitch: Tensor, voiced: Tensor, hop: int, sample_rate: int) -> Tensor:
    """All harmonics of a pitch in Hz (B, F) below half the rate, of unit power where voiced: (B, F * hop)."""
    samples = pitch.shape[-1] * hop
    both = torch.stack([pitch, voiced], 1).float()
    pitch, voiced = interpolate(both, samples, mode="linear").unbind(1)
    phase = (2 * math.pi / sample_rate * pitch.double()).cumsum(-1) % (2 * math.pi)
    count = (sample_rate / 2 / pitch).ceil() - 1
    # The sum of cos(k phase) for k = 1 ... count, by Dirichlet's kernel.
    half = (phase / 2).sin()
    is_pulse = half.abs() < 1e-4
    ratio = ((count + 0.5) * phase).sin() / half.masked_fill(is_pulse, 1.0)
    total = torch.where(is_pulse, count.double(), (ratio - 1) / 2)
    return (total * (2 / count).sqrt() * voiced).float()


def load_vocoder(path: Path) -> Vocoder:
    """The vocoder of a file that recipes/vocoder/train_vocoder.py wrote, whose shapes tell the rate. Raises InputError for
    another file."""
    with reading(f"vocoder = {path}", "give a file that recipes/vocoder/train_vocoder.py wrote"):
        tensors, _ = read_weights(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for network in map(Vocoder, VOCODERS):
            if {name: tuple(each.shape) for name, each in network.state_dict().items()} == shapes:
                break
        else:
            raise ValueError("not the weights of this vocoder: other names or shapes")
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.eval().requires_grad_(False)
