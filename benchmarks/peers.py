"""Compares training steps and sampling with those of Irodori-TTS and F5-TTS, by their own code.

    git clone https://github.com/Aratako/Irodori-TTS /tmp/Irodori-TTS
    git clone https://github.com/SWivid/F5-TTS /tmp/F5-TTS
    pip install --no-deps -r benchmarks/requirements.txt
    OMP_NUM_THREADS=1 python benchmarks/peers.py --irodori /tmp/Irodori-TTS --f5 /tmp/F5-TTS

Models of 47 million parameters (3 % more or less) with random weights on the CPU; what is compared, and
how, is in benchmarks/README.md. Each ratio is CPU seconds of the peer's faster mode over ours, taken within
a round; above 1 ours is faster. Writes benchmarks/results/peers.json; exit status 1 where an aim is missed.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # of the CPU

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.common import RESULTS, cell, ratios, rotated, spread, write_report  # noqa: E402
from benchmarks.peer_models import (  # noqa: E402
    F5,
    F5TTS,
    IRODORI,
    OURS,
    SOURCES,
    Contender,
    Irodori,
    Ours,
    fifty_million,
    import_peer,
    make_batch,
    randomize,
    trainer,
)
from torchtitan.models.dit_tts.errors import InputError  # noqa: E402

CLASSES: dict[str, type[Any]] = {OURS: Ours, IRODORI: Irodori, F5: F5TTS}
PRECISIONS = ("bf16", "fp32")
MODES = ("eager", "compiled")
# Least median of the ratios: of a step compiled against compiled, and of sampling against the peer's faster mode.
STEP_AIMS = {IRODORI: 1.25, F5: 1.15}
SAMPLING_AIM = 1.2

SIZES = (4, 192, 72, 192)
"""samples, latent frames, characters and reference frames of the batch of equal lengths"""

ROWS = (1, 4)
"""sentences that are sampled at once"""

SAMPLING_STEPS = 8


@dataclass(frozen=True)
class Variant:
    """A contender in one of its modes."""

    name: str
    mode: str

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}"


def variants(names: Iterable[str]) -> list[Variant]:
    return [Variant(name, mode) for name in names for mode in MODES]


def interleaved(
    work: dict[Variant, Callable[[], Any]], rounds: int, progress: tqdm
) -> dict[Variant, list[float]]:
    """CPU seconds of each variant in each round, which all take turns at in rotated order. Before, each does
    the work of all rounds without being timed if it is compiled, else of one round.

    Raises:
        RuntimeError: a graph was made in a timed turn.
    """
    names = list(work)
    seconds: dict[Variant, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(rounds if name.mode == "compiled" else 1):
            work[name]()
        progress.update()
    for number in range(rounds):
        for name in rotated(names, number):
            gc.collect()
            graphs, began = graphs_made(), time.process_time()
            work[name]()
            seconds[name].append(time.process_time() - began)
            if graphs_made() != graphs:
                raise RuntimeError(f"{name} compiled in a timed turn")
            progress.update()
    return seconds


def graphs_made() -> int:
    """Graphs, and attempts at them, of this process."""
    counters = torch._dynamo.utils.counters
    return counters["frames"]["total"] + counters["stats"]["unique_graphs"]


def compared(costs: dict[Variant, list[float]]) -> dict[str, Any]:
    """Ratios of costs within a round: of each of our modes to all variants, and to each peer's faster mode."""

    def cost(variant: Variant) -> float:
        return statistics.median(costs[variant])

    def ratio(variant: Variant, own: Variant) -> dict[str, float]:
        return ratios(costs[variant], costs[own])

    peers = dict.fromkeys(v.name for v in costs if v.name != OURS)
    fastest = {peer: min((v for v in costs if v.name == peer), key=cost) for peer in peers}
    ours = [variant for variant in costs if variant.name == OURS]
    return {
        "ratios": {
            own.mode: {peer: {"mode": v.mode} | ratio(v, own) for peer, v in fastest.items()}
            for own in ours
        },
        "fastest_of_ours": min(ours, key=cost).mode,
        "ratios_to_all": {
            own.mode: {str(v): ratio(v, own) for v in costs if v.name != OURS} for own in ours
        },
    }


def build(wanted: Iterable[Variant]) -> dict[Variant, Contender]:
    """Models of their own for all variants. Beyond Dynamo's limit blocks would silently run eagerly."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    found = {variant: CLASSES[variant.name](fifty_million()) for variant in wanted}
    for variant, contender in found.items():
        if variant.mode == "compiled":
            contender.compile()
    return found


# ---- what is compared


def step(names: list[str], precision: str, rounds: int, progress: tqdm) -> dict[str, Any]:
    """A training step on one batch without padding."""
    batch = make_batch(*SIZES)
    contenders = build(variants(names))
    steps = {v: trainer(each, precision) for v, each in contenders.items()}
    seconds = interleaved({v: lambda s=s: s(batch) for v, s in steps.items()}, rounds, progress)
    return compared(seconds) | {
        "seconds": {str(v): spread(values) for v, values in seconds.items()},
        "parameters": {
            v.name: sum(p.numel() for p in each.module.parameters())
            for v, each in contenders.items()
        },
    }


def sampling(
    names: list[str], precision: str, rows: int, rounds: int, progress: tqdm
) -> dict[str, Any]:
    """Sentences of one length by Euler steps, text and speaker guided in the first half of the time:
    the same number of rows through the network."""
    batch = make_batch(rows, *SIZES[1:])
    contenders = build(variants(name for name in names if name != F5))
    work = {}
    for variant, contender in contenders.items():
        randomize(contender.module.parameters())
        contender.module.to(torch.bfloat16 if precision == "bf16" else torch.float32).eval()
        work[variant] = lambda c=contender: c.sample(batch, SAMPLING_STEPS, 3.0, 5.0)
    seconds = interleaved(work, rounds, progress)
    return compared(seconds) | {"seconds": {str(v): spread(s) for v, s in seconds.items()}}


# ---- the command


def missed(found: dict[str, Any]) -> list[str]:
    """The aims that were missed, in words."""
    sentences = []
    for name, case in found.items():
        if name.startswith("step"):
            compiled = case["ratios_to_all"]["compiled"]
            ours = {peer: compiled.get(str(Variant(peer, "compiled"))) for peer in STEP_AIMS}
        else:
            ours = case["ratios"][case["fastest_of_ours"]]
        for peer, ratio in ours.items():
            aim = STEP_AIMS[peer] if name.startswith("step") else SAMPLING_AIM
            if ratio is not None and ratio["median"] < aim:
                sentences.append(f"{name}: {ratio['median']:.2f} to {peer}, aim {aim}")
    return sentences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--irodori", type=Path, help="checkout of Irodori-TTS")
    parser.add_argument("--f5", type=Path, help="checkout of F5-TTS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON to write; with both peers, the results")
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
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    cases: dict[str, Callable[[tqdm], dict[str, Any]]] = {}
    for precision in PRECISIONS:
        cases[f"step, {precision}"] = partial(step, names, precision, options.rounds)
        for rows in ROWS if IRODORI in names else ():
            case = partial(sampling, names, precision, rows, options.rounds)
            cases[f"sampling, {precision}, {rows} at once"] = case
    found: dict[str, Any] = {}
    for name, measure_case in cases.items():
        with tqdm(desc=name, unit="turn") as bar:
            found[name] = measure_case(bar)
        for mode, found_ratios in found[name]["ratios_to_all"].items():
            for variant, ratio in found_ratios.items():
                print(f"{name}, ours {mode}: {cell(ratio)} to {variant}", flush=True)
    out = options.out or (RESULTS / "peers.json" if len(names) == 3 else None)
    if out:
        report = {
            "rounds": options.rounds,
            "sizes": {"step": SIZES, "rows": ROWS, "sampling_steps": SAMPLING_STEPS},
            "commits": {n: commit_of(c) for n, c in checkouts.items() if c is not None},
            "cases": found,
        }
        write_report(out, report)
    sentences = missed(found)
    print("\n".join(["missed:", *sentences]) if sentences else "every aim is reached")
    return 1 if sentences else 0


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
