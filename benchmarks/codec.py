"""How fast the DAC-VAE encodes and decodes: several recordings at once against one at a time.

    OMP_NUM_THREADS=1 python benchmarks/codec.py                 # 2 minutes of one core

The network has the released widths and random weights, which take the same time as trained ones; the sound is noise.
Rounds run every size once, in rotated order, all rows in the network at once; the time is this process's CPU time over
its number of threads. Writes benchmarks/results/codec.json.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.common import RESULTS, cell, ratios, rotated, spread, write_report  # noqa: E402
from tools.harness.dac_vae_checkpoints import RELEASED, write_dac_vae  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.dac_vae import DacVaeCodec, load_dac_vae  # noqa: E402

SIZES = (1, 2, 4, 8)
"""recordings at once"""


def measure(codec: DacVaeCodec, frames: int, rounds: int) -> dict[str, Any]:
    """Seconds of audio per second by way and size, and the ratio to one recording within a round."""
    codec.frames_at_once = sys.maxsize
    waveforms = 0.3 * torch.randn(max(SIZES), frames * codec.hop_length)
    latents = torch.randn(max(SIZES), frames, codec.latent_channels)
    ways = {"encode": (codec.encode_batch, waveforms), "decode": (codec.decode_batch, latents)}
    speed: dict[str, dict[int, list[float]]] = {way: {size: [] for size in SIZES} for way in ways}
    with tqdm(total=rounds * len(SIZES), desc="codec") as progress:
        for number in range(rounds):
            for size in rotated(SIZES, number):
                for way, (run, given) in ways.items():
                    began = time.process_time()
                    run(given[:size])
                    took = (time.process_time() - began) / torch.get_num_threads()
                    speed[way][size].append(size * frames / codec.frames_per_second / took)
                progress.update()
    return {
        way: {
            str(size): {
                "audio_seconds_a_second": spread(rates),
                "ratio_to_1": ratios(rates, by_size[1]),
            }
            for size, rates in by_size.items()
        }
        for way, by_size in speed.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.4, help="of a recording")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "codec.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = write_dac_vae(Path(folder) / "weights.pth", RELEASED, watermark=None)
        codec = load_dac_vae(str(path), "cpu")
    codec.decode(codec.encode(torch.zeros(codec.hop_length)))  # the first call sets libraries up
    frames = round(options.seconds * codec.frames_per_second)
    batches = measure(codec, frames, options.rounds)
    write_report(
        options.output,
        {"recording_frames": frames, "rounds": options.rounds, "batches": batches},
    )
    print("| at once | encode, s of audio per s | × one | decode, s of audio per s | × one |")
    print("|---|---|---|---|---|")
    for size in map(str, SIZES):
        rows = [batches[way][size] for way in ("encode", "decode")]
        parts = [f"{cell(r['audio_seconds_a_second'])} | {cell(r['ratio_to_1'])}" for r in rows]
        print(f"| {size} | {' | '.join(parts)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
