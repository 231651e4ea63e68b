"""Padding of our length buckets, against padding to the longest and to each batch's longest.

    python benchmarks/padding.py

Padding of packed rows, too, the three streams of each. Lengths alone, no archives: 200,000 utterances of each of three distributions, and of narrower and
wider ones to see from where on eight shapes are too few. A reference is another utterance of the
distribution, of at most 384 frames; a text has 3.3 tokens per second of its utterance (log-normal,
sigma 0.15), as in benchmark mode. For several `[data] max_reference_ratio`: padding of frames, text
and references, and what that costs the 800M model. Writes benchmarks/results/padding.json; exit
status 1 where one of the three misses the aim.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402, F401  (before ours, which extends its packages)

from benchmarks.synthetic_speech import (  # noqa: E402
    FRAMES_PER_SECOND,
    LONGEST_REFERENCE_FRAMES,
    LONGEST_SECONDS,
    SIGMA,
    lognormal_frames,
    uniform_frames,
)
from torchtitan.models.dit_tts.config.job_config import MAX_BUCKETS, Data  # noqa: E402
from torchtitan.models.dit_tts.data.buckets import (  # noqa: E402
    ALIGNMENT,
    BatchPolicy,
    choose_edges,
)
from torchtitan.models.dit_tts.data.packed_rows import (  # noqa: E402
    PackedPolicy,
    PackedSampler,
    batch_policy,
)
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.model.flops import Lengths, training_flops  # noqa: E402
from torchtitan.models.dit_tts.model_config import model_flavors  # noqa: E402
from torchtitan.models.dit_tts.run.benchmark.synthetic import SUBWORDS_PER_SECOND  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402

AIM = 0.85
PACKED_AIM = 0.97
LONGEST_PER_ROW = (1, 2, 4, 8)
BATCH_SIZE = 32
MEANS = (9.0, 5.0)
SIGMAS = (0.4, 0.5, 0.6, 0.7)
RATIOS = (0.0, 2.0, 1.0, 0.5)
STREAMS = ("useful", "useful_text", "useful_references")
_TEXT_RATE_SIGMA = 0.15

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    f"uniform, 3 to {LONGEST_SECONDS:g} s": lambda generator, n: uniform_frames(
        generator, n, 3.0, LONGEST_SECONDS
    ),
    **{
        f"log-normal, mean {mean:g} s, sigma {SIGMA:g}": (
            lambda generator, n, mean=mean: lognormal_frames(generator, n, mean)
        )
        for mean in MEANS
    },
}


def buckets(
    frames: np.ndarray,
    references: np.ndarray,
    tokens: np.ndarray,
    num_buckets: int = MAX_BUCKETS,
    ratio: float = Data.max_reference_ratio,
    longest_per_row: int = 0,
) -> BatchPolicy:
    """The buckets of a run with the default settings but for these; its rows with `longest_per_row`."""
    data = Data(
        max_frames=768,
        max_speaker_frames=LONGEST_REFERENCE_FRAMES,
        max_reference_ratio=ratio,
        num_buckets=num_buckets,
        batching="packed" if longest_per_row else "buckets",
        longest_per_row=longest_per_row or 4,
        batch_multiple=8,
        speaker_patch_size=4,
    )
    return batch_policy(data, BATCH_SIZE, frames, references, tokens)


def batch_max(frames: np.ndarray, generator: np.random.Generator) -> tuple[float, int]:
    """(useful fraction, shapes) of random batches, each padded to its longest."""
    n = len(frames) // BATCH_SIZE * BATCH_SIZE
    batches = generator.permutation(frames)[:n].reshape(-1, BATCH_SIZE)
    longest = batches.max(axis=1)
    return float(batches.sum() / (longest.sum() * BATCH_SIZE)), len(np.unique(longest))


def useful(lengths: np.ndarray, padded: np.ndarray) -> float:
    return float(lengths.sum() / padded.sum())


def best_of_any_shapes(frames: np.ndarray) -> float:
    """Useful fraction with the best eight lengths of all, multiples of 8 or not.

    `choose_edges` finds the best multiples of ``ALIGNMENT``; of scaled lengths all are.
    """
    scaled = frames * ALIGNMENT
    edges = np.array(choose_edges(scaled, MAX_BUCKETS, int(scaled.max())))
    return useful(scaled, edges[np.searchsorted(edges, scaled)])


def by_width(mean_seconds: float, n: int, seed: int) -> dict[str, dict[str, float]]:
    """Useful fraction with eight buckets for narrow and wide log-normal lengths, by sigma."""
    results = {}
    for sigma in SIGMAS:
        frames = lognormal_frames(np.random.default_rng(seed), n, mean_seconds, sigma)
        edges = np.array(choose_edges(frames, MAX_BUCKETS, 768))
        results[f"{sigma:g}"] = {
            "useful": useful(frames, edges[np.searchsorted(edges, frames)]),
            "best_of_any_8_shapes": best_of_any_shapes(frames),
        }
    return results


def texts_and_references(
    frames: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(text tokens, reference frames) of the utterances, (n,) each."""
    n = len(frames)
    rate = SUBWORDS_PER_SECOND * generator.lognormal(0.0, _TEXT_RATE_SIGMA, n)
    tokens = 2 + np.ceil(frames / FRAMES_PER_SECOND * rate).astype(np.int64)
    references = np.minimum(generator.permutation(frames), LONGEST_REFERENCE_FRAMES)
    return tokens.clip(max=Data.max_text_tokens), references


def with_ratio(
    frames: np.ndarray, tokens: np.ndarray, references: np.ndarray, ratio: float
) -> dict[str, Any]:
    """Padding of the three streams, and training FLOPs of the 800M model without its frozen text encoder."""
    policy = buckets(frames, references, tokens, ratio=ratio)
    padded = np.array(policy.shapes)[policy.bucket_of(frames)].T
    cropped = np.minimum(references, padded[2])
    args = model_flavors()["800M"]
    # Of all samples at once: the formula is one of integers.
    executed, useful = (
        float(training_flops(args, Lengths(*lengths)).sum(dtype=float))
        for lengths in (padded, (frames, tokens, cropped))
    )
    return {
        "reference_frames_of_shapes": [R for _, _, R in policy.shapes],
        "padding_fraction": 1 - policy.useful_fraction,
        "text_padding_fraction": 1 - policy.useful_text_fraction,
        "reference_padding_fraction": 1 - policy.useful_reference_fraction,
        "references_cropped": float((cropped < references).mean()),
        "reference_frames_kept": float(cropped.sum() / references.sum()),
        "gflop_per_useful_frame": executed / frames.sum() / 1e9,
        "useful_flops": useful / executed,
    }


def measure(frames: np.ndarray, generator: np.random.Generator) -> dict[str, Any]:
    """Shares of useful frames, and the shapes that a compiled model sees."""
    tokens, references = texts_and_references(frames, generator)
    by_number = [
        buckets(frames, references, tokens, number).useful_fraction
        for number in range(1, MAX_BUCKETS + 1)
    ]
    began = time.perf_counter()
    policy = buckets(frames, references, tokens)
    seconds = time.perf_counter() - began
    share, shapes = batch_max(frames, generator)
    return {
        "mean_seconds": float(frames.mean() / FRAMES_PER_SECOND),
        "pad_to_max": {"useful": useful(frames, np.full_like(frames, frames.max())), "shapes": 1},
        "batch_max": {"useful": share, "shapes": shapes},
        "buckets": {
            "useful": policy.useful_fraction,
            "shapes": len(set(policy.shapes)),
            "edges": policy.edges,
            "rows_of_a_batch": policy.batch_sizes,
            "useful_by_number_of_buckets": by_number,
            "seconds_to_choose": seconds,
        },
        "packed": {
            str(number): packed_rows(frames, tokens, references, number)
            for number in LONGEST_PER_ROW
        },
        "by_max_reference_ratio": {
            f"{ratio:g}": with_ratio(frames, tokens, references, ratio) for ratio in RATIOS
        },
    }


def packed_rows(
    frames: np.ndarray, tokens: np.ndarray, references: np.ndarray, longest_per_row: int
) -> dict[str, Any]:
    """The rows of an epoch, as the order fills them."""
    policy = buckets(frames, references, tokens, longest_per_row=longest_per_row)
    assert isinstance(policy, PackedPolicy)
    order = PackedSampler(np.arange(len(frames)), policy, seed=0)
    began = time.process_time()
    order.batch(0)
    seconds = time.process_time() - began
    placed = sum(len(order.batch(k).samples) for k in range(order.batches_before_epoch(1)))
    return {
        "row": policy.shapes[0],
        "max_samples": policy.max_samples,
        "epochs": policy.epochs,
        "useful": policy.useful_fraction,
        "useful_text": policy.useful_text_fraction,
        "useful_references": policy.useful_reference_fraction,
        "left_out": len(frames) - placed,
        "cpu_seconds_for_an_epoch": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/padding.json"))
    options = parser.parse_args()

    results = {}
    for name, draw in DISTRIBUTIONS.items():
        generator = np.random.default_rng(options.seed)
        results[name] = measure(draw(generator, options.lengths), generator)
    print("| lengths | pad to max | batch max (shapes) | buckets (shapes) | 4 buckets | packed |")
    print("|---" * 6 + "|")
    for name, row in results.items():
        ours = row["buckets"]
        print(
            f"| {name} | {row['pad_to_max']['useful']:.1%} | {row['batch_max']['useful']:.1%} "
            f"({row['batch_max']['shapes']}) | {ours['useful']:.1%} ({ours['shapes']}) | "
            f"{ours['useful_by_number_of_buckets'][3]:.1%} | {row['packed']['4']['useful']:.1%} |"
        )
    print(
        "\n| packed rows: lengths | longest_per_row | useful frames | text | reference | row | CPU s |"
    )
    print("|---" * 7 + "|")
    for name, row in results.items():
        for number, found in row["packed"].items():
            streams = " | ".join(f"{found[key]:.1%}" for key in STREAMS)
            size = " × ".join(map(str, found["row"]))
            seconds = found["cpu_seconds_for_an_epoch"]
            print(f"| {name} | {number} | {streams} | {size} | {seconds:.2f} |")
    print(
        "\n| lengths | max_reference_ratio | padding: frames | text | reference | references cropped "
        "| GFLOP per useful frame | useful FLOPs |"
    )
    print("|---" * 8 + "|")
    for name, row in results.items():
        for ratio, found in row["by_max_reference_ratio"].items():
            print(
                f"| {name} | {ratio} | {found['padding_fraction']:.1%} | "
                f"{found['text_padding_fraction']:.1%} | {found['reference_padding_fraction']:.1%} | "
                f"{found['references_cropped']:.1%} | {found['gflop_per_useful_frame']:.3f} | "
                f"{found['useful_flops']:.1%} |"
            )
    widths = {
        f"log-normal, mean {mean:g} s": by_width(mean, options.lengths, options.seed)
        for mean in MEANS
    }
    sigmas = " | ".join(f"sigma {sigma:g}" for sigma in SIGMAS)
    print(f"\n| eight buckets (any eight lengths) | {sigmas} |")
    print("|---" * (len(SIGMAS) + 1) + "|")
    for name, row in widths.items():
        cells = [f"{c['useful']:.1%} ({c['best_of_any_8_shapes']:.1%})" for c in row.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    missed = [
        name
        for name, row in results.items()
        if row["buckets"]["useful"] < AIM
        or row["buckets"]["shapes"] > MAX_BUCKETS
        or row["packed"]["4"]["left_out"]
        or min(row["packed"]["4"][key] for key in STREAMS) < PACKED_AIM
    ]
    report = {
        "lengths": options.lengths,
        "batch_size": BATCH_SIZE,
        "aim": {"useful": AIM, "packed": PACKED_AIM, "shapes": MAX_BUCKETS, "missed_by": missed},
        "distributions": results,
        "by_sigma": widths,
        "conditions": environment(),
    }
    write_atomic(Path(options.output), json.dumps(report, indent=1) + "\n")
    for name in missed:
        print(
            f"MISSED: {name}: less than {AIM:.0%} useful in buckets or {PACKED_AIM:.0%} packed, or more "
            f"than {MAX_BUCKETS} shapes"
        )
    print(f"{'passed' if not missed else 'FAILED'}: {options.output}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
