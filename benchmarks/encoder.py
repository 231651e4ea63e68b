"""Real text tokens per second through a pretrained encoder: padded rows against sorted and packed ones.

    python benchmarks/encoder.py                                # a CPU: 6 blocks of T5Gemma2-270m
    python benchmarks/encoder.py --device cuda --blocks 0 --dtype bfloat16 --batch 64

Blocks and widths are those of google/t5gemma-2-270m-270m (--model for another known one), weights are
random, the embedding has 1,024 rows. Texts are those of log-normal utterances (mean 9 s, sigma 0.5, 1
to 30 s), 3.3 tokens per second with a speaker's rate spread by 15 %. Two kinds of batches: of one length
bucket, as the loader makes them, padded to the bucket's longest text in the data; and of any lengths.

- padded: (B, L) with a padding mask, the usual call.
- sorted: one text per row in four groups of like lengths (encoders that take no packed rows).
- packed: several texts a row (T5Gemma2, T5).

All three give the same features, which is checked first: their difference, relative to their norm, is at
most 1e-4 in float32 and 0.05 in bfloat16. Rounds are interleaved.
Writes benchmarks/results/encoder.json.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.synthetic_speech import FRAMES_PER_SECOND, lognormal_frames  # noqa: E402
from torchtitan.models.dit_tts.data.buckets import choose_edges  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402
from torchtitan.models.dit_tts.text.hf_encoder import find_source  # noqa: E402
from torchtitan.models.dit_tts.text.hf_files import KNOWN_SIZES  # noqa: E402
from torchtitan.models.dit_tts.text.packing import pack_rows  # noqa: E402
from torchtitan.models.dit_tts.text.text_encoder import (  # noqa: E402
    PretrainedTextEncoder,
)

TOKENS_PER_SECOND = 3.3
RATE_SPREAD = 0.15
LONGEST_TOKENS = 192
ALIGNMENT = 8
VOCAB_SIZE = 1024
MOST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.05}


def make_encoder(options: argparse.Namespace) -> PretrainedTextEncoder:
    source = find_source(options.model, download=False)
    source.config.vocab_size = VOCAB_SIZE
    if options.blocks and options.model.startswith("google/t5gemma"):
        source.config.num_hidden_layers = options.blocks
        source.config.layer_types = source.config.layer_types[: options.blocks]
    elif options.blocks:
        source.config.num_layers = options.blocks
    encoder = PretrainedTextEncoder(source)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            scale = 0.05 if parameter.dim() > 1 else 0.0
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if parameter.dim() == 1 and not options.model.startswith("google/t5gemma"):
                parameter.fill_(1.0)
    return encoder.to(options.device, getattr(torch, options.dtype)).requires_grad_(False)


def batches(kind: str, batch: int, count: int) -> list[tuple[np.ndarray, int]]:
    """(lengths (B,), L) of `count` batches."""
    generator = np.random.default_rng(0)
    frames = lognormal_frames(generator, 20_000, mean_seconds=9.0)
    rate = TOKENS_PER_SECOND * generator.lognormal(0, RATE_SPREAD, len(frames))
    tokens = np.clip(frames / FRAMES_PER_SECOND * rate, 2, LONGEST_TOKENS).astype(np.int64)
    groups = [np.arange(len(frames))]
    if kind == "bucket":
        bucket = np.searchsorted(choose_edges(frames, 8, int(frames.max())), frames)
        groups = [np.flatnonzero(bucket == number) for number in range(bucket.max() + 1)]
    made = []
    for number in range(count):
        inside = groups[number % len(groups)]
        longest = int(tokens[inside].max())
        made.append((generator.choice(tokens[inside], batch), -(-longest // ALIGNMENT) * ALIGNMENT))
    return made


def ways(
    encoder: PretrainedTextEncoder, lengths: np.ndarray, padded: int, device: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """The same batch three ways; each gives the features (B, L, h)."""
    mask = np.arange(padded) < lengths[:, None]
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, VOCAB_SIZE - 8, mask.shape)).to(
        device
    )
    mask_there = torch.from_numpy(mask).to(device)

    def usual() -> torch.Tensor:
        hidden = encoder.core(input_ids=ids, attention_mask=mask_there.long()).last_hidden_state
        return hidden * mask_there[..., None]

    def sorted_groups() -> torch.Tensor:
        rows = pack_rows(mask, packed=False).to(device)
        encoder.packs = False
        hidden = encoder(ids, mask_there, rows)
        encoder.packs = True
        return hidden

    def packed() -> torch.Tensor:
        return encoder(ids, mask_there, pack_rows(mask).to(device))  # the layout's time counts too

    return {"padded": usual, "sorted": sorted_groups, "packed": packed}


def check_same(features: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Raises RuntimeError where they differ by more than rounding does. By the norm: of millions of
    values in bfloat16 a few are far off."""
    error = float((features - expected).norm() / expected.norm())
    if not error <= MOST_DIFFERENCE[dtype]:
        raise RuntimeError(f"features differ by {error:.2g} of their norm in {dtype}")


def seconds_of(work: Callable[[], torch.Tensor], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(
    kind: str, encoder: PretrainedTextEncoder, options: argparse.Namespace
) -> dict[str, Any]:
    made = batches(kind, options.batch, options.batches)
    work = [ways(encoder, lengths, padded, options.device) for lengths, padded in made]
    for calls in work:  # also the warm-up
        expected, *others = (call().float() for call in calls.values())
        for other in others:
            check_same(other, expected, options.dtype)
    tokens = sum(int(lengths.sum()) for lengths, _ in made)
    seconds: dict[str, list[float]] = {name: [] for name in work[0]}
    for _ in tqdm(range(options.rounds), desc=kind, unit="round"):
        for name in seconds:
            total = sum(seconds_of(calls[name], options.device) for calls in work)
            seconds[name].append(total)
    padded = sum(len(lengths) * length for lengths, length in made)

    def share(packed: bool) -> float:
        rows = [pack_rows(np.arange(n) < lengths[:, None], packed).shapes for lengths, n in made]
        return tokens / sum(r * w for shapes in rows for r, w in shapes)

    return {
        "real_tokens": tokens,
        "useful_fraction": {
            "padded": tokens / padded,
            "sorted": share(False),
            "packed": share(True),
        },
        "tokens_per_second": {n: spread([tokens / s for s in v]) for n, v in seconds.items()},
        "ratio_to_padded": {
            name: spread([p / s for p, s in zip(seconds["padded"], values, strict=True)])
            for name, values in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(KNOWN_SIZES), default="google/t5gemma-2-270m-270m")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the encoder; 0: all")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=8, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/encoder.json"))
    options = parser.parse_args()
    encoder = make_encoder(options)
    report: dict[str, Any] = {"options": vars(options), "environment": environment()}
    with torch.no_grad():
        for kind in ("bucket", "any"):
            report[kind] = measure(kind, encoder, options)
    write_atomic(Path(options.out), json.dumps(report, indent=1) + "\n")
    print(
        "\n| batches | rows | useful tokens | real tokens per second | to padded |\n|---|---|---|---|---|"
    )
    for kind in ("bucket", "any"):
        found = report[kind]
        for name, rate in found["tokens_per_second"].items():
            ratio = found["ratio_to_padded"][name]
            print(
                f"| {kind} | {name} | {found['useful_fraction'][name]:.1%} | {rate['median']:.0f} "
                f"({rate['min']:.0f}-{rate['max']:.0f}) | {ratio['median']:.2f} "
                f"({ratio['min']:.2f}-{ratio['max']:.2f}) |"
            )


if __name__ == "__main__":
    main()
