"""The base voice by ONNX compared with torch, with the same noise: latents, words by Whisper, and seconds of one core.

python benchmarks/onnx_voice.py harvard-sentences.txt        # one sentence in a line
"""

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.common import RESULTS, cell, ratios, write_report  # noqa: E402
from titan_tts import from_pretrained, onnx_voice  # noqa: E402
from titan_tts.cli import main as titan_tts  # noqa: E402
from titan_tts.speak.utterance import Utterance  # noqa: E402
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys  # noqa: E402
from torchtitan.models.dit_tts.speech.sampling.sampler import SAMPLING_STREAM  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.interface import Sound  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.statistics import rate_interval  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors  # noqa: E402

KINDS = ("torch", "float32", "int8")


def run(texts: list[str], folder: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    model, hears = (
        from_pretrained("titan_tts:base", dtype="float32"),
        open_recognizer("whisper-tiny.en"),
    )
    voices = {}
    for kind in KINDS[1:]:
        place = str(folder / kind)
        assert titan_tts(["export", "titan_tts:base", place, "--onnx", f"--dtype={kind}"]) == 0
        voices[kind] = onnx_voice.load(place)
    errors: dict[str, list[int]] = {kind: [] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    words, spoken, distance, farthest = (
        [],
        0.0,
        dict.fromkeys(KINDS[1:], 0.0),
        dict.fromkeys(KINDS, 0.0),
    )
    for text in texts:
        voice = model.default_voice
        [frames] = model.lengths.frames([Utterance(text, voice)])
        piece = Utterance(text, voice, frames=frames)
        row = torch.tensor([model._request(piece).noise_row()])
        keys = stream_keys(0, torch.tensor(0), row, SAMPLING_STREAM)
        noise = normal(keys, (frames, model.codec.latent_channels))[0].numpy()
        began = time.process_time()
        [said] = model.speak([piece], seed=0)
        seconds["torch"].append(time.process_time() - began)
        sounds, wanted = {"torch": said.waveform}, said.latents.numpy()
        for kind, speaks in voices.items():
            began = time.process_time()
            found = speaks.latents(text, frames, noise=noise)
            sounds[kind] = torch.from_numpy(speaks.decode(found))
            seconds[kind].append(time.process_time() - began)
            farthest[kind] = max(farthest[kind], float(np.abs(found - wanted).max()))
            distance[kind] += float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)) / len(
                texts
            )
        spoken += said.seconds
        for kind, sound in sounds.items():
            counted = count_errors(text, hears.transcribe(Sound(sound, 16_000), "en"), "en")
            errors[kind].append(counted.word_errors)
        words.append(counted.words)
    rows = {}
    for kind in KINDS:
        interval = rate_interval(errors[kind], words)
        rows[kind] = {
            "words_wrong": [interval.value, interval.low, interval.high],
            "core_seconds_per_second": sum(seconds[kind]) / spoken,
            "ratio_to_torch": ratios(seconds[kind], seconds["torch"]),
            "largest_difference_of_a_latent": farthest[kind],
            "relative_distance": distance.get(kind, 0.0),
        }
        shown = ", ".join(f"{100 * each:.1f} %" for each in rows[kind]["words_wrong"])
        print(kind, shown, cell(rows[kind]["ratio_to_torch"]), rows[kind])
    return {"texts": len(texts), "words": sum(words), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sentences", help="a file, one in a line")
    parser.add_argument("--texts", type=int, default=60, help="so many, evenly chosen")
    parser.add_argument("--out", default=str(RESULTS / "onnx_voice.json"))
    given = parser.parse_args()
    lines = [
        each.strip() for each in Path(given.sentences).read_text().splitlines() if each.strip()
    ]
    chosen = [lines[round(n)] for n in np.linspace(0, len(lines) - 1, given.texts)]
    with TemporaryDirectory() as folder:
        write_report(Path(given.out), run(chosen, Path(folder)))


if __name__ == "__main__":
    main()
