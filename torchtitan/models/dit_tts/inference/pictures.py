"""Pictures of speech: log-mel spectrograms, one under the other, to compare by eye."""

from pathlib import Path

import torch
from torch import Tensor

from torchtitan.models.dit_tts.codec.spectrogram import hann_window, mel_filters, stft
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file

MEL_BANDS = 80
DYNAMIC_RANGE_DB = 70.0  # below the loudest point of all panels everything is drawn black


def log_mel_decibels(waveform: Tensor, sample_rate: int) -> Tensor:
    """Log-mel spectrogram (frames, 80) in dB of a waveform (samples,): window 40 ms, hop 10 ms."""
    hop = sample_rate // 100
    window = hann_window(4 * hop)
    waveform = waveform.detach().to("cpu", torch.float32)
    waveform = torch.nn.functional.pad(waveform, (0, -len(waveform) % hop))
    amplitude = stft(waveform, window, hop).abs() * (2 / window.sum())
    mel = amplitude @ mel_filters(MEL_BANDS, amplitude.shape[1], sample_rate).T
    return 20 * mel.clamp_min(1e-6).log10()


def save_spectrogram_comparison(
    path: str | Path, panels: list[tuple[str, Tensor]], sample_rate: int
) -> None:
    """Draw one log-mel spectrogram a panel (title, waveform (samples,)) into a PNG.

    All panels share the time axis and the colour scale. The file is replaced in one step, so that a
    page which shows it while a run writes it never sees half a picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing spectrograms needs matplotlib: pip install matplotlib"
        ) from error
    if not panels:
        raise InputError("no panel was given to draw; give at least one (title, waveform)")
    for title, waveform in panels:
        if waveform.ndim != 1 or waveform.numel() == 0:
            raise InputError(
                f"panel '{title}' has a waveform of shape {tuple(waveform.shape)}; one channel of at least "
                "one sample is needed"
            )
    pictures = [log_mel_decibels(waveform, sample_rate) for _, waveform in panels]
    loudest = max(float(picture.max()) for picture in pictures)
    longest = max(len(waveform) for _, waveform in panels) / sample_rate

    # Figure and canvas by hand: pyplot keeps every figure in a global list, and training goes on.
    figure = Figure(figsize=(9, 0.6 + 1.9 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, _), picture in zip(axes, panels, pictures):
        image = axis.imshow(
            picture.T.numpy(),
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            vmin=loudest - DYNAMIC_RANGE_DB,
            vmax=loudest,
            extent=(0, len(picture) / 100, 0, MEL_BANDS),
        )
        axis.set_facecolor("black")
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylabel("mel band")
        axis.set_xlim(0, longest)
    axes[-1].set_xlabel("time (seconds)")
    figure.colorbar(image, ax=list(axes), label="dB")

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
