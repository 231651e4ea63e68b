"""Compares training steps and sampling with those of Irodori-TTS and F5-TTS, by their own code.

    git clone https://github.com/Aratako/Irodori-TTS /tmp/Irodori-TTS
    git clone https://github.com/SWivid/F5-TTS /tmp/F5-TTS
    pip install --no-deps -r benchmarks/requirements.txt
    OMP_NUM_THREADS=1 python benchmarks/peers.py --irodori /tmp/Irodori-TTS --f5 /tmp/F5-TTS

Models of 47 million parameters (3 % more or less) with random weights on the CPU; what is compared, and
how, is in benchmarks/README.md. Each ratio is CPU seconds of the peer over ours, taken within a round;
above 1 ours is faster. Writes benchmarks/results/peers.json; exit status 1 where an aim is missed.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # of the CPU

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.speed.cases import fifty_million, randomize  # noqa: E402
from benchmarks.speed.peers import (  # noqa: E402
    F5,
    F5TTS,
    IRODORI,
    OURS,
    SOURCES,
    Batch,
    Contender,
    Irodori,
    Ours,
    import_peer,
    make_batch,
    trainer,
)
from benchmarks.synthetic_speech import lognormal_frames  # noqa: E402
from titan_tts.plan.activations import StorageLedger  # noqa: E402
from torchtitan.models.dit_tts.config.job_config import Data  # noqa: E402
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatchSampler  # noqa: E402
from torchtitan.models.dit_tts.data.buckets import ALIGNMENT, make_batch_policy  # noqa: E402
from torchtitan.models.dit_tts.errors import InputError  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

RESULTS = ROOT / "benchmarks/results/peers.json"
CLASSES: dict[str, type[Any]] = {OURS: Ours, IRODORI: Irodori, F5: F5TTS}
PRECISIONS = ("bf16", "fp32")
MODES = ("eager", "compiled")
# kind -> mode -> least median of the ratio to each peer
AIMS = {"step": {"eager": 1.15, "compiled": 1.3}, "mixed": {"eager": 1.0, "compiled": 1.25}}
SAMPLING_AIM = 1.2
CHARACTERS_PER_FRAME = 15 / 25
LONGEST, TEXT_LIMIT, REFERENCE_LIMIT = 768, 480, 384


@dataclass(frozen=True)
class Sizes:
    step: tuple[int, int, int, int] = (4, 192, 72, 192)
    """samples, latent frames, characters and reference frames of the batch of equal lengths"""

    utterances: int = 512
    batches: int = 8
    """of mixed lengths in a round"""

    rows: tuple[int, ...] = (1, 4)
    """sentences that are sampled at once"""

    sampling_steps: int = 8


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def interleaved(
    work: dict[str, Callable[[int], Any]], rounds: int, progress: tqdm
) -> dict[str, list[float]]:
    """CPU seconds of each contender in each round, which all take turns at in rotated order. Before,
    each does its work once without being timed."""
    names = list(work)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            began = time.process_time()
            work[name](number)
            if number >= 0:
                seconds[name].append(time.process_time() - began)
            progress.update()
    return seconds


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        name: spread(a / b for a, b in zip(values, seconds[OURS], strict=True))
        for name, values in seconds.items()
        if name != OURS
    }
    return {"seconds": {name: spread(v) for name, v in seconds.items()}, "ratios": ratios}


def build(names: Iterable[str], compiled: bool, shapes: int) -> dict[str, Contender]:
    torch._dynamo.reset()
    found = {name: CLASSES[name](fifty_million()) for name in names}
    for name, contender in found.items():
        if compiled:
            contender.compile(shapes if name == OURS or shapes == 1 else 0)
    return found


# ---- what is compared


def step(
    names: list[str], precision: str, mode: str, sizes: Sizes, rounds: int, progress: tqdm
) -> dict[str, Any]:
    """A training step on one batch without padding."""
    rows, *lengths = sizes.step
    batch = make_batch(*([length] * rows for length in lengths))
    contenders = build(names, mode == "compiled", 1)
    steps = {name: trainer(each, precision) for name, each in contenders.items()}
    found = compared(
        interleaved({n: lambda _, s=s: s(batch) for n, s in steps.items()}, rounds, progress)
    )
    found["parameters"] = {
        name: sum(p.numel() for p in each.module.parameters()) for name, each in contenders.items()
    }
    if mode == "eager":
        found["peak_activations_mib"] = {
            name: peak_mib(contenders[name], run, batch) for name, run in steps.items()
        }
    return found


def peak_mib(contender: Contender, run: Callable[[Batch], None], batch: Batch) -> float:
    """Largest sum of the tensors that a step makes, without gradients and the optimizer's states."""
    run(batch)  # makes both
    gradients = [p.grad for p in contender.module.parameters() if p.grad is not None]
    with StorageLedger([*contender.module.parameters(), *gradients, *vars(batch).values()]) as made:
        run(batch)
    return made.peak(without=[p.grad for p in contender.module.parameters()]) / 2**20


class Lengths:
    """Utterances of log-normal lengths (mean 9 s, sigma 0.5), each with a text and the reference of
    another one, in ours' and F5-TTS's batches of as many frames."""

    def __init__(self, sizes: Sizes):
        generator = np.random.default_rng(0)
        self.frames = lognormal_frames(generator, sizes.utterances, 9.0)
        text = self.frames * CHARACTERS_PER_FRAME * generator.lognormal(0, 0.15, sizes.utterances)
        self.text = np.clip(text.astype(int), 1, np.minimum(TEXT_LIMIT, self.frames))
        self.reference = np.minimum(generator.permutation(self.frames), REFERENCE_LIMIT)
        self.budget = 2 * LONGEST
        data = Data(
            max_frames=LONGEST,
            max_speaker_frames=REFERENCE_LIMIT,
            max_reference_ratio=1.0,
            max_text_tokens=TEXT_LIMIT,
            num_buckets=8,
            batch_multiple=1,
            speaker_patch_size=fifty_million().speaker_patch_size,
        )
        lengths = self.frames, self.reference, self.text
        self.policy = make_batch_policy(data, self.budget // LONGEST, *lengths)

    def ours(self, compiled: bool) -> list[Batch]:
        """An epoch's batches, a batch of each bucket first. As in training those that are not compiled end
        with their longest row."""
        buckets = self.policy.bucket_of(self.frames)
        samples = [np.flatnonzero(buckets == b) for b in range(len(self.policy.edges))]
        order = GlobalBatchSampler(samples, self.policy.batch_sizes, seed=0)
        batches = [order.batch(number) for number in range(order.batches_before_epoch(1))]
        seen: set[int] = set()
        firsts = [b for b in batches if b.bucket not in seen and not seen.add(b.bucket)]
        found = []
        for batch in [*firsts, *batches]:
            shape = self.policy.shapes[batch.bucket]
            references = np.minimum(self.reference[batch.samples], shape[2])
            lengths = (self.frames[batch.samples], self.text[batch.samples], references)
            if not compiled:
                shape = [-(-int(each.max()) // ALIGNMENT) * ALIGNMENT for each in lengths]
            found.append(make_batch(*(each.tolist() for each in lengths), shape))
        self.buckets = len(firsts)
        return found

    def of_f5(self) -> list[Batch]:
        """Its own dynamic batches, each padded to its longest."""
        from f5_tts.model.dataset import DynamicBatchSampler

        source = SequentialSampler(_FrameLengths(self.frames))
        batches = DynamicBatchSampler(source, self.budget, random_seed=0)
        return [
            make_batch(self.frames[b].tolist(), self.text[b].tolist(), [1] * len(b))
            for b in batches
        ]


class _FrameLengths:
    def __init__(self, frames: np.ndarray):
        self.frames = frames

    def __len__(self) -> int:
        return len(self.frames)

    def get_frame_len(self, index: int) -> int:
        return int(self.frames[index])


def mixed(
    names: list[str], precision: str, mode: str, sizes: Sizes, rounds: int, progress: tqdm
) -> dict[str, Any]:
    """Useful latent frames per CPU second on mixed lengths; F5-TTS only, as Irodori-TTS pads all to 30 s."""
    names = [name for name in names if name != IRODORI]
    lengths = Lengths(sizes)
    batches = {OURS: lengths.ours(mode == "compiled"), F5: lengths.of_f5()}
    contenders = build(names, mode == "compiled", len(lengths.policy.shapes))
    steps = {name: trainer(each, precision) for name, each in contenders.items()}
    useful: dict[str, list[int]] = {name: [] for name in names}

    def work(name: str, number: int) -> None:
        if number < 0:  # every shape of ours, and as many of the peer's
            chosen = batches[name][: lengths.buckets]
        else:
            first = lengths.buckets + number * sizes.batches
            places = range(first, first + sizes.batches)
            chosen = [batches[name][place % len(batches[name])] for place in places]
            useful[name].append(sum(int(batch.frames.sum()) for batch in chosen))
        for batch in chosen:
            steps[name](batch)

    seconds = interleaved(
        {name: lambda number, name=name: work(name, number) for name in names}, rounds, progress
    )
    rates = {n: [u / s for u, s in zip(useful[n], seconds[n], strict=True)] for n in names}
    ratio = spread(a / b for a, b in zip(rates[OURS], rates[F5], strict=True))
    padded = {
        name: sum(int(b.frames.sum()) for b in each) / sum(b.latents[..., 0].numel() for b in each)
        for name, each in batches.items()
    }
    return {
        "frames_per_second": {name: spread(values) for name, values in rates.items()},
        "ratios": {F5: ratio},
        "useful_fraction": padded,
        "shapes": lengths.policy.shapes,
    }


def sampling(
    names: list[str], precision: str, rows: int, sizes: Sizes, rounds: int, progress: tqdm
) -> dict[str, Any]:
    """Sentences of one length by Euler steps, text and speaker guided in the first half of the time:
    the same number of rows through the network."""
    names = [name for name in names if name != F5]
    _, *lengths = sizes.step
    batch = make_batch(*([length] * rows for length in lengths))
    contenders = build(names, False, 1)
    work = {}
    for name, contender in contenders.items():
        randomize(contender.module.parameters())
        contender.module.to(torch.bfloat16 if precision == "bf16" else torch.float32).eval()
        work[name] = lambda _, c=contender: c.sample(batch, sizes.sampling_steps, 3.0, 5.0)
    return compared(interleaved(work, rounds, progress))


# ---- the command


def missed(found: dict[str, Any]) -> list[str]:
    """The aims that were missed, in words."""
    sentences = []
    for name, case in found.items():
        kind, precision, mode = name.split(", ")
        aim = SAMPLING_AIM if kind == "sampling" else AIMS[kind][mode]
        for peer, ratio in case["ratios"].items():
            if ratio["median"] < aim:
                sentences.append(f"{name}: {ratio['median']:.2f} to {peer}, aim {aim}")
    return sentences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--irodori", type=Path, help="checkout of Irodori-TTS")
    parser.add_argument("--f5", type=Path, help="checkout of F5-TTS")
    parser.add_argument("--only", action="append", choices=["step", "mixed", "sampling"])
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; 1 is steadiest")
    parser.add_argument("--tiny", action="store_true", help="whether it works, not how fast")
    parser.add_argument("--out", type=Path, help="JSON to write; without choices, the results")
    options = parser.parse_args()
    checkouts = {IRODORI: options.irodori, F5: options.f5}
    names = [OURS]
    for name, checkout in checkouts.items():
        if checkout is None:
            flag = "--irodori" if name == IRODORI else "--f5"
            print(f"{name} is left out; git clone {SOURCES[name][0]} and give it by {flag}")
            continue
        import_peer(name, checkout)
        names.append(name)
    if len(names) == 1:
        raise InputError("there is no peer to compare with; give --irodori, --f5 or both")
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    sizes = Sizes(step=(2, 32, 12, 32), utterances=32, batches=1, rows=(1,), sampling_steps=2)
    sizes = sizes if options.tiny else Sizes()
    cases: list[tuple[str, Callable[[tqdm], dict[str, Any]]]] = []
    for precision in options.precision or PRECISIONS:
        for kind, measure in (("step", step), ("mixed", mixed)):
            for mode in options.mode or MODES:
                wanted = kind in (options.only or [kind]) and (kind == "step" or F5 in names)
                if wanted and (precision == "bf16" or (kind, mode) == ("step", "eager")):
                    arguments = (names, precision, mode, sizes, options.rounds)
                    cases.append(
                        (
                            f"{kind}, {precision}, {mode}",
                            lambda bar, m=measure, a=arguments: m(*a, bar),
                        )
                    )
        if "sampling" in (options.only or ["sampling"]) and IRODORI in names:
            for rows in sizes.rows:
                arguments = (names, precision, rows, sizes, options.rounds)
                cases.append(
                    (
                        f"sampling, {precision}, {rows} at once",
                        lambda bar, a=arguments: sampling(*a, bar),
                    )
                )
    found: dict[str, Any] = {}
    for name, measure_case in cases:
        with tqdm(desc=name, unit="turn") as bar:
            found[name] = measure_case(bar)
        for peer, ratio in found[name]["ratios"].items():
            values = f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
            print(f"{name}: {values} to {peer}", flush=True)
    chosen = options.only or options.precision or options.mode or options.tiny
    out = options.out or (None if chosen or len(names) < 3 else RESULTS)
    if out:
        places = ("irodori", "f5", "out")
        given = {key: value for key, value in vars(options).items() if key not in places}
        report = {
            "environment": environment(),
            "options": given,
            "sizes": asdict(sizes),
            "commits": {n: commit_of(c) for n, c in checkouts.items() if c is not None},
            "cases": found,
        }
        write_atomic(out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    sentences = missed(found)
    print("\n".join(["missed:", *sentences]) if sentences else "every aim is reached")
    return 1 if sentences else 0


def commit_of(checkout: Path) -> str:
    head = (checkout / ".git/HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    reference = checkout / ".git" / head.removeprefix("ref: ")
    return reference.read_text().strip() if reference.exists() else head


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
