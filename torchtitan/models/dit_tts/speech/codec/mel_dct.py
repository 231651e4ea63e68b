"""The embedded codec: log-mel blocks under a fixed 2-D DCT. No learned weights, no download.

Shapes are those of DAC-VAE (25 frames/s, 128 channels), so a model trained on it is the same model.

    waveform (T * 640,) at 16 kHz
      -> |STFT|, window 640, hop 160          (4T, 321)
      -> 80 mel bands, logarithm              (4T, 80)
      -> blocks of four frames, 2-D DCT       (T, 4, 80): row = rate of change, column = quefrency
      -> the low corner: 56+40+20+12 columns  (T, 128)
      -> minus mean, over sd^0.5, times one constant

Dividing by sd^0.5 (half-whitening) leaves half of the natural order of importance: a small
flow-matching network trained on fully whitened principal components of such blocks made five times
the word errors. The constant brings the mean variance over the channels to one, as flow matching's
noise has it. scripts/measure_codec_stats.py measured the 128 means and deviations in
mel_dct_stats.json on the training part of assets/spoken_digits.

Decoding runs the steps backwards; phase comes from integrating its gradients, refined by 16 fast
Griffin-Lim iterations. About 50 times real time on one core. Or a learned vocoder makes the waveform of
the log-mel bands (vocoder.py): the latents are the same, so the data and the models are, too. One of 24 kHz takes waveforms
of 24 kHz, which are resampled to 16 kHz before the first step.
"""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan.models.dit_tts.bounded import parse_json, read_bytes
from torchtitan.models.dit_tts.config.codec_name import STATISTICS_NAME, VOCODERS
from torchtitan.models.dit_tts.errors import reading
from torchtitan.models.dit_tts.speech.audio import resample
from torchtitan.models.dit_tts.speech.codec.interface import (
    Codec,
    check_latents,
    check_waveforms,
)
from torchtitan.models.dit_tts.speech.codec.spectrogram import (
    HOP,
    MEL_BANDS,
    SAMPLE_RATE,
    WINDOW_LENGTH,
    griffin_lim,
    hann_window,
    integrate_phase,
    invert_mel,
    mel_filters,
    stft,
)
from torchtitan.models.dit_tts.speech.codec.vocoder import load_vocoder

STATISTICS_FILE = Path(__file__).with_name(STATISTICS_NAME)
VOCODER_FOLDER = Path(__file__).parent
STACKED_FRAMES = 4  # spectrogram frames per latent frame
KEPT_COLUMNS = (56, 40, 20, 12)  # DCT columns of each of the four rows; 128 in all
AMPLITUDE_FLOOR = 1e-4  # added to the band amplitudes, where a full-scale sine has 1; -80 dB
AMPLITUDE_CEILING = 50.0  # no speech comes near it; keeps an untrained model's output finite
MEL_INVERSION_ITERATIONS = 10
GRIFFIN_LIM_ITERATIONS = 16


def dct_matrix(size: int) -> Tensor:
    """Orthonormal DCT-II as a matrix (size, size): rows are frequencies, columns positions."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi * (position + 0.5) * frequency / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class MelDctTransform:
    """The codec before scaling: waveform <-> the kept DCT coefficients (T, 128)."""

    def __init__(self) -> None:
        self.window = hann_window(WINDOW_LENGTH)
        self.amplitude_scale = 2 / float(self.window.sum())
        self.filters = mel_filters(MEL_BANDS, WINDOW_LENGTH // 2 + 1, SAMPLE_RATE)
        self.row_dct = dct_matrix(STACKED_FRAMES)
        self.column_dct = dct_matrix(MEL_BANDS)
        kept = torch.arange(MEL_BANDS) < torch.tensor(KEPT_COLUMNS)[:, None]
        self.kept_index = kept.flatten().nonzero().flatten()  # (128,) into the flat (4 * 80)

    def analyse(self, waveform: Tensor) -> Tensor:
        """Coefficients (T, 128) of a waveform (T * 640,)."""
        amplitude = stft(waveform, self.window, HOP).abs() * self.amplitude_scale
        log_mel = (amplitude @ self.filters.T + AMPLITUDE_FLOOR).log()
        blocks = log_mel.view(-1, STACKED_FRAMES, MEL_BANDS)
        return (self.row_dct @ blocks @ self.column_dct.T).flatten(1)[:, self.kept_index]

    def log_mel(self, coefficients: Tensor) -> Tensor:
        """Log-mel amplitudes (4T, 80) of coefficients (T, 128)."""
        blocks = coefficients.new_zeros(coefficients.shape[0], STACKED_FRAMES * MEL_BANDS)
        blocks[:, self.kept_index] = coefficients
        blocks = blocks.view(-1, STACKED_FRAMES, MEL_BANDS)
        return (self.row_dct.T @ blocks @ self.column_dct).reshape(-1, MEL_BANDS)

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """Waveform (T * 640,) of coefficients (T, 128)."""
        log_mel = self.log_mel(coefficients)
        mel = log_mel.clamp_max(math.log(AMPLITUDE_CEILING)).exp() - AMPLITUDE_FLOOR
        spectrum = invert_mel(mel.clamp_min(1e-9), self.filters, MEL_INVERSION_ITERATIONS)
        spectrum = spectrum / self.amplitude_scale
        phase = integrate_phase(spectrum, WINDOW_LENGTH, HOP)
        return griffin_lim(spectrum, phase, self.window, HOP, GRIFFIN_LIM_ITERATIONS)


class MelDctCodec(Codec):
    """`Codec` over MelDctTransform. Runs on the CPU in float32, whatever device the input is on."""

    name = "mel_dct"
    sample_rate = SAMPLE_RATE
    hop_length = HOP * STACKED_FRAMES
    latent_channels = sum(KEPT_COLUMNS)

    def __init__(
        self, statistics_file: Path = STATISTICS_FILE, vocoder_file: Path | None = None
    ) -> None:
        with reading(
            f"codec = {statistics_file}", "copy it again, or give mel_dct for the built-in one"
        ):
            text = str(read_bytes(statistics_file), "utf-8")
            statistics = parse_json(text)
            self.mean = torch.tensor(statistics["mean"], dtype=torch.float32)
            deviation = torch.tensor(statistics["standard_deviation"], dtype=torch.float32)
            if not self.mean.shape == deviation.shape == (self.latent_channels,):
                raise ValueError(f"not the statistics of {self.latent_channels} channels")
            if not (
                self.mean.isfinite().all() and deviation.isfinite().all() and deviation.min() > 0
            ):
                raise ValueError(
                    "statistics that are not finite, or a deviation that is not positive"
                )
        self.transform = MelDctTransform()
        # After division by sd^0.5 the variance of a channel is its sd: their mean becomes one.
        self.scale = deviation.sqrt() * deviation.mean().sqrt()
        settings = (WINDOW_LENGTH, HOP, MEL_BANDS, KEPT_COLUMNS, AMPLITUDE_FLOOR)
        self.vocoder = None
        if vocoder_file is not None:  # it changes no latents, so the fingerprint stays
            self.vocoder = load_vocoder(vocoder_file)
            self.sample_rate, self.hop_length = self.vocoder.rate, self.vocoder.hop * STACKED_FRAMES
            self.name = f"mel_dct+{VOCODERS[self.sample_rate]}"
        self.fingerprint = hashlib.sha256(f"{settings}{text}".encode()).hexdigest()[:16]

    def to_whole_frames(self, waveforms: Tensor) -> Tensor:
        """Waveforms (..., samples) -> (..., T * hop_length), padded with zeros."""
        return pad(waveforms, (0, -waveforms.shape[-1] % self.hop_length))

    @torch.no_grad()
    def encode_batch(self, waveforms: Tensor) -> Tensor:
        """Waveforms (B, samples) in [-1, 1] -> latents (B, ceil(samples / hop_length), 128) float32."""
        check_waveforms(waveforms)
        waveforms = self.to_whole_frames(waveforms.detach().to("cpu", torch.float32))
        if self.sample_rate != SAMPLE_RATE:
            rows = (resample(row.numpy(), self.sample_rate, SAMPLE_RATE) for row in waveforms)
            waveforms = torch.stack([torch.from_numpy(row) for row in rows])
        # One after another: on one core a batch is not faster, and so each is `encode`'s to the bit.
        coefficients = torch.stack([self.transform.analyse(waveform) for waveform in waveforms])
        return (coefficients - self.mean) / self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (T, 128) -> waveform (T * hop_length,) float32 in [-1, 1]."""
        check_latents(latents, self.latent_channels)
        latents = latents.detach().to("cpu", torch.float32)
        if self.vocoder is not None:
            return self.vocoder(self.log_mel(latents)).clamp(-1.0, 1.0)
        return self.transform.synthesise(latents * self.scale + self.mean).clamp(-1.0, 1.0)

    def log_mel(self, latents: Tensor) -> Tensor:
        """Log-mel amplitudes (4T, 80) that latents (T, 128) stand for."""
        return self.transform.log_mel(latents * self.scale + self.mean)
