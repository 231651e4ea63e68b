"""How fast the DAC-VAE encodes and decodes: batches against single recordings, portions against the whole.

    OMP_NUM_THREADS=1 python benchmarks/codec.py                 # 3 minutes of one core
    python benchmarks/codec.py --device cuda --seconds 10 --long-seconds 120 --rounds 7

The network has the released widths and random weights, which take the same time as trained ones; the
sound is noise.

1. Batches of equal recordings, all rows in the network at once: seconds of audio per second, and the ratio
   to one recording at a time within the same round.
2. One long recording in portions of several lengths, against the same in one piece: speed, memory, and
   the largest difference of a value.

Rounds run every case once, in rotated order; given are the median and the least and most. On a CPU the
time is this process's CPU time over its number of threads, so that others on the machine disturb it
less; on a GPU it is wall time.

Writes benchmarks/results/codec.json.
"""

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.common import RESULTS, cell, ratios, rotated, spread, write_report  # noqa: E402
from tools.harness.dac_vae_checkpoints import RELEASED, write_dac_vae  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.dac_vae import DacVaeCodec, load_dac_vae  # noqa: E402

BATCH_SIZES = (1, 2, 4, 8)
WHOLE = "whole"
MIB = 1 << 20


def peak_mib(device: str, work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What `work` gives, and the memory it took beyond what was held before, in MiB."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = work()
        return out, (torch.cuda.max_memory_allocated() - before) / MIB
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _resident_mib("VmRSS")
    out = work()
    return out, _resident_mib("VmHWM") - before


def _resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def timed(device: str, work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What `work` gives, and the seconds it took."""
    if device == "cpu":
        began = time.process_time()
        out = work()
        return out, (time.process_time() - began) / torch.get_num_threads()
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = work()  # ends with a copy to the CPU, which waits
    return out, time.perf_counter() - began


def with_portions(codec: DacVaeCodec, seconds: float | None) -> DacVaeCodec:
    """The codec with this much audio in the network at once; None: everything."""
    codec.frames_at_once = (
        sys.maxsize if seconds is None else int(seconds * codec.frames_per_second)
    )
    return codec


def measure_batches(
    codec: DacVaeCodec, device: str, frames: int, rounds: int, progress: tqdm
) -> dict[str, Any]:
    with_portions(codec, None)
    waveforms = 0.3 * torch.randn(max(BATCH_SIZES), frames * codec.hop_length)
    latents = torch.randn(max(BATCH_SIZES), frames, codec.latent_channels)
    seconds = frames / codec.frames_per_second
    speed: dict[str, dict[int, list[float]]] = {"encode": {}, "decode": {}}
    for number in range(rounds):
        for size in rotated(BATCH_SIZES, number):
            for name, run, given in (
                ("encode", codec.encode_batch, waveforms),
                ("decode", codec.decode_batch, latents),
            ):
                _, took = timed(device, lambda: run(given[:size]))
                speed[name].setdefault(size, []).append(size * seconds / took)
            progress.update()
    return {
        name: {
            str(size): {
                "audio_seconds_a_second": spread(by_size[size]),
                "ratio_to_1": ratios(by_size[size], by_size[1]),
            }
            for size in BATCH_SIZES
        }
        for name, by_size in speed.items()
    }


def measure_portions(
    codec: DacVaeCodec, device: str, frames: int, chunks: list[float], rounds: int, progress: tqdm
) -> dict[str, Any]:
    waveform = 0.3 * torch.randn(frames * codec.hop_length)
    latents = torch.randn(frames, codec.latent_channels)
    seconds = frames / codec.frames_per_second
    cases: dict[str, float | None] = {WHOLE: None} | {f"{chunk:g} s": chunk for chunk in chunks}
    runs = {"encode": lambda: codec.encode(waveform), "decode": lambda: codec.decode(latents)}
    whole: dict[str, Tensor] = {}
    found = {
        name: {case: {"speed": [], "memory": [], "difference": 0.0} for case in cases}
        for name in runs
    }
    for number in range(rounds):
        # The whole comes first in each round: the others are compared with it.
        for case in [WHOLE, *rotated(list(cases)[1:], number)]:
            with_portions(codec, cases[case])
            for name, run in runs.items():
                (out, took), memory = _measured(device, run)
                row = found[name][case]
                row["speed"].append(seconds / took)
                row["memory"].append(memory)
                out_of_whole = whole.setdefault(name, out)
                row["difference"] = max(row["difference"], float((out - out_of_whole).abs().max()))
            progress.update()
    return {
        name: {
            case: {
                "audio_seconds_a_second": spread(row["speed"]),
                "ratio_to_whole": ratios(row["speed"], rows[WHOLE]["speed"]),
                "peak_mib": spread(row["memory"]),
                "largest_difference": row["difference"],
            }
            for case, row in rows.items()
        }
        for name, rows in found.items()
    }


def _measured(device: str, run: Callable[[], Tensor]) -> tuple[tuple[Tensor, float], float]:
    took = 0.0

    def work() -> Tensor:
        nonlocal took
        out, took = timed(device, run)
        return out

    out, memory = peak_mib(device, work)
    return (out, took), memory


def show(report: dict[str, Any]) -> None:
    print(
        "\n| recordings at once | encode, s of audio per s | × one | decode, s of audio per s | × one |"
    )
    print("|---|---|---|---|---|")
    for size in map(str, BATCH_SIZES):
        rows = [report["batches"][name][size] for name in ("encode", "decode")]
        parts = [f"{cell(r['audio_seconds_a_second'])} | {cell(r['ratio_to_1'])}" for r in rows]
        print(f"| {size} | {' | '.join(parts)} |")
    print(
        "\n| portions | encode × whole | MiB | largest difference | decode × whole | MiB | "
        "largest difference |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in report["portions"]["encode"]:
        rows = [report["portions"][name][case] for name in ("encode", "decode")]
        parts = [
            f"{cell(r['ratio_to_whole'])} | {r['peak_mib']['median']:.0f} | {r['largest_difference']:.1e}"
            for r in rows
        ]
        print(f"| {case} | {' | '.join(parts)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a recording in a batch")
    parser.add_argument("--long-seconds", type=float, default=3.0, help="of the long recording")
    parser.add_argument(
        "--chunks", type=float, nargs="+", default=[1.0, 2.0], help="portions, seconds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "codec.json")
    options = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = write_dac_vae(Path(folder) / "weights.pth", RELEASED, watermark=None)
        codec = load_dac_vae(str(path), options.device)
    frames = [round(s * codec.frames_per_second) for s in (options.seconds, options.long_seconds)]
    codec.decode(codec.encode(torch.zeros(codec.hop_length)))  # the first call sets libraries up
    steps = options.rounds * (len(BATCH_SIZES) + 1 + len(options.chunks))
    with tqdm(total=steps, desc="codec") as progress:
        batches = measure_batches(codec, options.device, frames[0], options.rounds, progress)
        portions = measure_portions(
            codec, options.device, frames[1], options.chunks, options.rounds, progress
        )
    report = {
        "recording_frames": frames[0],
        "long_recording_frames": frames[1],
        "rounds": options.rounds,
        "batches": batches,
        "portions": portions,
    }
    write_report(options.output, report)
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
