"""Log-mel spectrograms of generated speech, one under the other to compare by eye."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.codec.spectrogram import hann_window, mel_filters, stft

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEL_BANDS = 80
DYNAMIC_RANGE_DB = 70.0  # below the loudest point of all panels; lower levels are drawn black


def log_mel_decibels(waveform: Tensor, sample_rate: int) -> Tensor:
    """Log-mel spectrogram (frames, 80) in dB of a waveform (samples,): window 40 ms, hop 10 ms."""
    hop = sample_rate // 100
    window = hann_window(4 * hop)
    waveform = waveform.detach().to("cpu", torch.float32)
    waveform = torch.nn.functional.pad(waveform, (0, -len(waveform) % hop))
    amplitude = stft(waveform, window, hop).abs() * (2 / window.sum())
    mel = amplitude @ mel_filters(MEL_BANDS, amplitude.shape[1], sample_rate).T
    return 20 * mel.clamp_min(1e-6).log10()


def save_spectrograms(path: str | Path, panels: list[tuple[str, Tensor]], sample_rate: int) -> None:
    """Writes `draw_spectrograms` as a PNG. The file is replaced at once, so that no viewer sees half a
    picture."""
    buffer = io.BytesIO()
    draw_spectrograms(panels, sample_rate).savefig(buffer, format="png", dpi=110)
    write_atomic(path, buffer.getvalue())


def draw_spectrograms(panels: list[tuple[str, Tensor]], sample_rate: int) -> "Figure":
    """A figure of one log-mel spectrogram per panel (title, waveform (samples,)), which share the time axis
    and the colour scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spectrograms = [log_mel_decibels(waveform, sample_rate) for _, waveform in panels]
    loudest = max(float(one.max()) for one in spectrograms)
    longest = max(len(waveform) for _, waveform in panels) / sample_rate

    # Figure and canvas by hand: pyplot keeps every figure in a global list.
    figure = Figure(figsize=(9, 0.6 + 1.9 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, _), spectrogram in zip(axes, panels, spectrograms, strict=True):
        image = axis.imshow(
            spectrogram.T.numpy(),
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            vmin=loudest - DYNAMIC_RANGE_DB,
            vmax=loudest,
            extent=(0, len(spectrogram) / 100, 0, MEL_BANDS),
        )
        axis.set_facecolor("black")
        axis.set_title(title, fontsize=9, loc="left", parse_math=False)
        axis.set_ylabel("mel band")
        axis.set_xlim(0, longest)
    axes[-1].set_xlabel("time (seconds)")
    figure.colorbar(image, ax=list(axes), label="dB")
    return figure
