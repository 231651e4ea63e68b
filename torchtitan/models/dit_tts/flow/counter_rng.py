"""Random numbers keyed by (seed, position in the stream), computed with tensor operations.

The noise of a sample must not depend on how the global batch is split over ranks, accumulation steps or
restarts, so a generator with a state cannot draw it. SplitMix64 (Steele, Lea and Flood 2014) is counter-based:
number i of a stream is a hash of key + i·γ, computed on any device without a host sync or a saved state.
"""

import math

import torch

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LOW_32 = 0xFFFFFFFF
# Primes from 2^31 to 2^32.
_PRIMES: tuple[int, ...] = (2362232017, 2555870503, 2869184147, 3062822641)
_PRIMES += (3376136261, 3689449901, 3883088401, 4196402033)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; `>>` of signed integers is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """Finaliser of SplitMix64: a bijection on int64 in which every input bit affects every output bit."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def stream_keys(
    seed: int, global_batch: torch.Tensor, row: torch.Tensor, stream: int
) -> torch.Tensor:
    """Keys (B,) int64 for each sample of a global batch and one use of randomness (`stream`).

    Args:
        global_batch: scalar int64, number of the global batch.
        row: (B,) int64, rows of the samples in the global batch.
        stream: number of the use, so that noise, time and dropout are independent.
    """
    key = torch.full_like(row, seed)
    for part in (torch.full_like(row, stream), global_batch.expand_as(row), row):
        key = mix((key + _GAMMA) ^ mix(part + _GAMMA))
    return key


def _bits(keys: torch.Tensor, count: int, first: torch.Tensor | None = None) -> torch.Tensor:
    """Random bits, (B, count) int64, from each stream's number `first` (B,) on, or its beginning."""
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device)
    if first is not None:
        counter = counter + first[:, None]
    return mix(keys[:, None] + counter * _GAMMA)


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One number per key, (B,) float64 in (0, 1)."""
    # 52 bits plus a half are exact in float64, and neither 0 nor 1 can occur.
    return (_shift_right(_bits(keys, 1)[:, 0], 12).double() + 0.5) * 2.0**-52


def permuted(row: torch.Tensor, keys: torch.Tensor, size: int | torch.Tensor) -> torch.Tensor:
    """Positions (B,) int64 of rows (B,) in a permutation of [0, size), drawn by keys (B,) that are all equal.

    Row j goes to (a·j + b) mod size. b is drawn, so every position is equally likely; a is a drawn product of
    primes above every size. So a and size have no common divisor, and this is a bijection that needs no size
    on the host. Rows keep a stride, which does no harm where their order is random.
    """
    bits = mix(keys + _GAMMA)
    factor = torch.ones_like(row)
    for number, prime in enumerate(_PRIMES):
        factor = torch.where((bits >> number) & 1 == 1, factor * prime % size, factor)
    return (factor * row + (_shift_right(bits, 16) % size)) % size


def normal(
    keys: torch.Tensor, shape: tuple[int, ...], first_pair: torch.Tensor | None = None
) -> torch.Tensor:
    """Standard normal numbers, (B, *shape) float32, by the Box-Muller transform.

    Pairs are consecutive in the flattened shape, so padding (more frames) leaves the numbers of earlier
    frames unchanged. With `first_pair` (B,) int64 they are a later part of each key's numbers.
    """
    count = math.prod(shape)
    bits = _bits(keys, (count + 1) // 2, first_pair)
    # 24 bits each. The half excludes log(0); if `first` rounds to 1, the radius is 0.
    first = (_shift_right(bits, 40).float() + 0.5) * 2.0**-24
    second = ((bits & _LOW_32) >> 8).float() * 2.0**-24
    radius = torch.sqrt(-2.0 * torch.log(first))
    angle = 2.0 * math.pi * second
    pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
    return pairs.flatten(1)[:, :count].unflatten(1, shape)
