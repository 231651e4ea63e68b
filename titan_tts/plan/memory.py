"""Peak memory of one GPU, and how many samples fit.

Activations of every shape are predicted from a few measured passes, because sizes are affine: over B
samples of T frames, L text tokens and R reference frames a pass holds a + B (b + c T + d L + e R) bytes.
Passes with two sample counts, half the frames, half the text and half the reference give the five
numbers. (Tables of angles grow with T but not with B: little next to a micro-batch.)

Under a memory budget the compiler decides again at every shape, and its decision can differ from one
shape to the next. Such blocks are measured near the config's own micro-batch, and without shards, where
autocast's copies of weights are part of the decision, at each bucket's lengths.
"""

import bisect
import copy
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from titan_tts.plan.activations import ActivationMemory, KindMemory, activation_memory, kind_memory
from titan_tts.plan.compiled_block import BlockCompiler
from titan_tts.plan.devices import Device
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.compile import blocks_compiled, compiled_stacks
from torchtitan.models.dit_tts.infra.parallelize import blocks_by_checkpointing
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths

CONTEXT_BYTES = int(1.5 * 2**30)
"""the device's context, libraries' workspaces and buffers of collectives; a guess"""

FRAGMENTED_FRACTION = 0.04
"""of a GPU's memory: reserved by the allocator and not usable; a guess"""

_MAX_SAMPLES = 4096
_SAMPLES = 2
"""of a pass; with a single one, tensors that are laid out by samples are not copied"""


class Activations:
    """Activations of micro-batches of any shape; passes that configs have in common run once."""

    def __init__(self, args: DiTTTSModelArgs, longest: Lengths, micro_batch: int):
        """longest: of the longest bucket, with this micro-batch; shorter buckets have as many frames."""
        self._args = args
        self._longest = longest
        self._frames = micro_batch * longest.frames
        self._kinds: dict[tuple[Any, ...], KindMemory] = {}
        self._encoders: dict[tuple[type, bool], BlockCompiler] = {}

    def near(self, micro_batch: int) -> "Activations":
        """For configs with another micro-batch, with the same passes."""
        other = copy.copy(self)
        other._frames = micro_batch * self._longest.frames
        return other

    def measured(
        self, config: JobConfig, sharded: bool, samples: int, lengths: Lengths
    ) -> tuple[ActivationMemory, list[list[list[str]]]]:
        """(bytes of a micro-batch from passes of just this shape, graphs of its decoder blocks). `sharded`: as in
        `kind_memory`."""
        options, stacks = config.activation_checkpoint, compiled_stacks(config)
        blocks = blocks_by_checkpointing(config, self._args.n_layers)
        found = {}
        tensor = config.parallelism.tensor_parallel_degree, config.megatron.sequence_parallel
        for kind in blocks:
            budget = options.memory_budget if kind == "memory_budget" else None
            key = kind, budget, stacks, sharded, tensor, samples, lengths
            if key not in self._kinds:
                self._kinds[key] = kind_memory(
                    config, self._args, samples, lengths, kind, sharded, self._encoders
                )
            found[kind] = self._kinds[key]
        return activation_memory(blocks, found), [each.graphs for each in found.values()]

    def memory(
        self, config: JobConfig, sharded: bool, samples: int, lengths: Lengths
    ) -> ActivationMemory:
        """Bytes of a micro-batch, predicted from passes of few shapes; arguments as in `measured`."""
        options = config.activation_checkpoint
        by_compiler = options.mode == "memory_budget" and blocks_compiled(config)
        found = None
        if sharded or not by_compiler:
            first = max(_SAMPLES, self._frames // self._longest.frames) if by_compiler else _SAMPLES
            found = self._affine(config, sharded, first, samples, lengths)
        if found is None:
            found = self._at_lengths(config, sharded, samples, lengths)
        return ActivationMemory(*(round(float(size)) for size in found))

    def _affine(
        self, config: JobConfig, sharded: bool, first: int, samples: int, lengths: Lengths
    ) -> np.ndarray | None:
        """(batch, saved, working) bytes; None where the compiler decided differently among the passes."""
        longest = self._longest
        T, L = max(2, longest.frames), max(2, longest.text_tokens)
        patch = self._args.speaker_patch_size
        R = max(2 * patch, longest.speaker_frames)
        fewer_R = R // (2 * patch) * patch
        longest = Lengths(T, L, R)
        shapes = [(first, longest), (first + 1, longest)]
        if lengths != longest:
            shapes += [
                (first, replace(longest, frames=T // 2)),
                (first, replace(longest, text_tokens=L // 2)),
                (first, replace(longest, speaker_frames=fewer_R)),
            ]
        passes = [self.measured(config, sharded, *shape) for shape in shapes]
        if any(graphs != passes[0][1] for _, graphs in passes):
            return None
        base, more, *shorter = (np.array(astuple(sizes), float) for sizes, _ in passes)
        shift = np.zeros_like(base)
        if shorter:
            frames, tokens, reference = shorter
            shift += (lengths.frames - T) * (base - frames) / (T - T // 2)
            shift += (lengths.text_tokens - L) * (base - tokens) / (L - L // 2)
            shift += (lengths.speaker_frames - R) * (base - reference) / (R - fewer_R)
        return base + shift + (samples - first) * (more - base + shift / first)

    def _at_lengths(
        self, config: JobConfig, sharded: bool, samples: int, lengths: Lengths
    ) -> np.ndarray:
        """(batch, saved, working) bytes, from passes at these lengths."""
        own = max(_SAMPLES, self._frames // lengths.frames)
        if samples == own:
            return np.array(astuple(self.measured(config, sharded, own, lengths)[0]), float)
        # Where the decision changes from one number of samples to the next, the next two are taken.
        for first in (own, own + 1, own + 2):
            (base, graphs), (more, others) = (
                self.measured(config, sharded, n, lengths) for n in (first, first + 1)
            )
            if graphs == others:
                break
        fewer, sizes = np.array(astuple(base), float), np.array(astuple(more), float)
        return fewer + (samples - first) * (sizes - fewer)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one GPU."""

    states: int
    activations: ActivationMemory
    total: int
    capacity: int
    fits: bool


def capacity(device: Device) -> int:
    """Maximum bytes of allocations."""
    return int(device.memory_gib * 2**30 * (1 - FRAGMENTED_FRACTION)) - CONTEXT_BYTES


def memory_need(states: int, each: ActivationMemory, device: Device) -> MemoryNeed:
    total = states + each.batch + each.saved + each.working
    return MemoryNeed(states, each, total, capacity(device), total <= capacity(device))


def largest_micro_batch(fits: Callable[[int], bool]) -> int:
    """The largest number of samples for which `fits(samples)` holds; 0 where one is too many."""
    samples = range(1, _MAX_SAMPLES + 1)
    return bisect.bisect_left(samples, True, key=lambda number: not fits(number))
