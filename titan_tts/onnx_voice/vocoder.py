"""The signal path of the vocoder of `speech/codec/vocoder.py` in numpy, between its two networks, which are graphs."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

SAMPLE_RATE, HOP, WINDOW = 16_000, 160, 640  # Hz, samples, samples


def waveform(
    pitch: np.ndarray,
    voiced: np.ndarray,
    noise: np.ndarray,
    filters: Sequence[np.ndarray],
) -> np.ndarray:
    """(F * HOP,) float32 of pitch in Hz (F,), voiced in [0, 1] (F,), white noise (F * HOP,) and the filters' log gain, phase
    and noise's log gain (F, bins)."""
    gain, phase, noise_gain = filters
    spectrum = _stft(_pulse_train(pitch, voiced)) * np.exp(gain + 1j * phase)
    return _istft(spectrum + _stft(noise) * np.exp(noise_gain)).clip(-1, 1).astype(np.float32)


def filled(pitch: np.ndarray, voiced: np.ndarray) -> np.ndarray:
    """Pitch (F,) in Hz with straight lines through what is not voiced, float32."""
    [position] = voiced.nonzero()
    if not len(position):
        return np.full(len(pitch), 50.0, np.float32)
    return np.interp(np.arange(len(pitch)), position, pitch[position]).astype(np.float32)


def _pulse_train(pitch: np.ndarray, voiced: np.ndarray) -> np.ndarray:
    """All harmonics of the pitch below half the rate, of unit power where voiced: (F * HOP,)."""
    place = (np.arange(len(pitch) * HOP) + 0.5) / HOP - 0.5  # of samples among the frames' middles
    pitch, voiced = (np.interp(place, np.arange(len(pitch)), each) for each in (pitch, voiced))
    phase = np.cumsum(2 * math.pi / SAMPLE_RATE * pitch) % (2 * math.pi)
    count = np.ceil(SAMPLE_RATE / 2 / pitch) - 1
    half = np.sin(phase / 2)
    is_pulse = np.abs(half) < 1e-4
    ratio = np.sin((count + 0.5) * phase) / np.where(is_pulse, 1.0, half)  # Dirichlet's kernel
    total = np.where(is_pulse, count, (ratio - 1) / 2)
    return total * np.sqrt(2 / count) * voiced


def _stft(samples: np.ndarray) -> np.ndarray:
    """Spectrum (F, bins) of samples (F * HOP,), zeros outside them."""
    frames = sliding_window_view(np.pad(samples, (WINDOW - HOP) // 2), WINDOW)[::HOP]
    return np.fft.rfft(frames * np.hanning(WINDOW + 1)[:-1])


def _istft(spectrum: np.ndarray) -> np.ndarray:
    """Samples (F * HOP,) whose STFT is nearest to the spectrum (F, bins): windowed overlap-add over squared windows."""
    frames, shifts, window = len(spectrum), WINDOW // HOP, np.hanning(WINDOW + 1)[:-1]
    pieces = (np.fft.irfft(spectrum, WINDOW) * window).reshape(frames, shifts, HOP)
    out = np.zeros((frames + shifts - 1, HOP))
    norm = np.zeros_like(out)
    for shift, weight in enumerate((window**2).reshape(shifts, HOP)):
        out[shift : shift + frames] += pieces[:, shift]
        norm[shift : shift + frames] += weight
    edge = (WINDOW - HOP) // 2
    return (out / norm.clip(1e-3)).reshape(-1)[edge : edge + frames * HOP]
