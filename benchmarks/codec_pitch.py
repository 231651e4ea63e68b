"""How much of a voice's pitch is left behind the codec: autocorrelation of recordings, and of their copies by it.

    python benchmarks/codec_pitch.py                 # half a minute of one core
    python benchmarks/codec_pitch.py --source DATA --codec weights.pth

For each frame of 50 ms the highest normalized autocorrelation at the lags of 60 to 300 Hz, which is near 1 for a
clear pitch, over the voiced frames (above 0.5 in the recording, and not silent). Printed are medians over a voice's
held-out recordings: the pitch, and the autocorrelation of the recording and of its copy.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from titan_tts.evaluate.prompts import Corpus  # noqa: E402
from torchtitan.models.dit_tts.speech.codec import build_codec  # noqa: E402

LOWEST, HIGHEST = 60, 300  # Hz
SECONDS, HOP_SECONDS = 0.05, 0.01


def peaks(sound: np.ndarray, rate: int) -> np.ndarray:
    """(frames, 3): height and lag of the highest autocorrelation, and the energy."""
    length, hop = int(SECONDS * rate), int(HOP_SECONDS * rate)
    window = np.hanning(length)
    of_window = np.correlate(window, window, "full")[length - 1 :]
    found = []
    for start in range(0, len(sound) - length, hop):
        frame = sound[start : start + length]
        frame = (frame - frame.mean()) * window
        own = np.correlate(frame, frame, "full")[length - 1 :]
        # Divided by the window's, which falls with the lag.
        ratio = own / max(own[0], 1e-9) * of_window[0] / of_window.clip(1e-3 * of_window[0])
        lag = rate // HIGHEST + int(ratio[rate // HIGHEST : rate // LOWEST].argmax())
        found.append((ratio[lag], lag, own[0]))
    return np.array(found).reshape(-1, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=str(ROOT / "assets/spoken_digits"))
    parser.add_argument("--codec", default="mel_dct")
    options = parser.parse_args()
    codec, corpus = build_codec(options.codec), Corpus(options.source)
    by_voice = defaultdict(list)
    for item in corpus.items:
        if item.split != "heldout":
            continue
        rate = codec.sample_rate
        sound = corpus.load(item).samples(rate)
        copy = codec.decode(codec.encode(torch.from_numpy(sound))).numpy()
        length = min(len(sound), len(copy))
        before, after = peaks(sound[:length], rate), peaks(copy[:length], rate)
        voiced = (before[:, 0] > 0.5) & (before[:, 2] > 0.05 * before[:, 2].max(initial=0.0))
        if voiced.any():
            row = rate / before[voiced, 1], before[voiced, 0], after[voiced, 0]
            by_voice[item.speaker].append([np.median(values) for values in row])
    for voice, rows in sorted(by_voice.items()):
        hertz, recording, copied = np.median(rows, axis=0)
        print(f"{voice}: {hertz:.0f} Hz, recording {recording:.2f}, codec {copied:.2f}")


if __name__ == "__main__":
    main()
