"""The picture of the README: a sentence as it was recorded and as the base voice says it.

python -m recipes.base_voice.picture recorded.wav generated.wav docs/images/base-voice.png --text "The sentence."
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import soundfile
from matplotlib.figure import Figure

_WINDOW, _HOP = 512, 128


def spectrogram(path: Path) -> tuple[np.ndarray, float]:
    """((bins, frames) in dB below the loudest, seconds)."""
    samples, rate = soundfile.read(path, dtype="float32")
    frames = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::_HOP] * np.hanning(
        _WINDOW
    )
    power = 20 * np.log10(np.abs(np.fft.rfft(frames)).T + 1e-5)
    return power - power.max(), len(samples) / rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("recorded", "generated", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--text", required=True)
    options = parser.parse_args()
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = "the synthesizer joe", "the base voice"
    for axis, title, path in zip(axes, titles, (options.recorded, options.generated), strict=True):
        power, seconds = spectrogram(path)
        axis.imshow(
            power, "magma", origin="lower", aspect="auto", vmin=-70, extent=(0, seconds, 0, 8)
        )
        axis.set(title=title, xlabel="s")
    axes[0].set_ylabel("kHz")
    figure.suptitle(f"“{options.text}”", fontsize=11)
    figure.savefig(options.out, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
