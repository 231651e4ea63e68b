"""What a micro-batch of any size holds and computes, from a few passes over tensors without data.

A pass is affine in the number of decoder blocks and in that of the speaker encoder's, so two and three
of the one and one and two of the other are run. In samples B, frames T and text tokens L every size in
it is either a + b T + c L, the same for any B, or a + B (b + c T + d L): passes with two and three
samples, with half the frames and with half the text, tell the rest. (Sums of the two kinds are off by
what the first grows with the lengths, tables of angles: nothing beside a micro-batch of any use.)

Under a memory budget the compiler decides anew at every shape, and its decision leaps: such blocks are
run at the lengths that are asked for, with the samples of the config's micro-batch and one more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.activations import (
    ActivationMemory,
    blocks_by_checkpointing,
    measure,
)
from torchtitan.models.dit_tts.plan.compiled_block import ModelCompiler, compiled_stacks
from torchtitan.models.dit_tts.plan.devices import Device
from torchtitan.models.dit_tts.plan.operations import (
    ATTENTION,
    FUSED,
    PRODUCT,
    OperationRecorder,
    Operations,
)


@dataclass(frozen=True)
class Work:
    """Time of one micro-batch at a device's full rates, forward and backward apart: arrays (2,)."""

    product_seconds: np.ndarray
    """products that the tensor cores bound, in bf16"""

    block_share: float
    """of these, the decoder blocks' part"""

    attention_seconds: np.ndarray
    moving_seconds: np.ndarray
    """kernels that the memory bounds, run one by one"""

    fused_seconds: np.ndarray
    """compiled pointwise kernels, each region of them as one"""

    kernels: np.ndarray


@dataclass(frozen=True)
class Shape:
    """Of a micro-batch; references are as long as the longest bucket's."""

    samples: int
    frames: int
    text_tokens: int


@dataclass(frozen=True)
class _Pass:
    memory: ActivationMemory
    operations: Operations


class _Passes:
    """Passes of one model with different shapes; tells the sizes in a pass with any other."""

    def __init__(self, passes: dict[Shape, _Pass]):
        """passes: first two that differ in samples alone, then those with half of something."""
        self._passes = passes
        self.longest, more = list(passes)[:2]
        self._samples = self.longest.samples, more.samples

    def _at(self, read: Callable[[_Pass], object], shape: Shape) -> np.ndarray:
        longest = self.longest
        few, more = (
            np.asarray(read(self._passes[replace(longest, samples=b)]), float)
            for b in self._samples
        )
        shift = np.zeros_like(few)  # of as many samples as the first pass has
        for name in ("frames", "text_tokens"):
            most, wanted = getattr(longest, name), getattr(shape, name)
            if wanted != most:
                fewer = replace(longest, **{name: _half(most)})
                slope = (few - np.asarray(read(self._passes[fewer]), float)) / (most - _half(most))
                shift += slope * (wanted - most)
        grows = more != few
        first, second = self._samples
        a_sample = np.where(grows, (more - few) / (second - first) + shift / first, 0.0)
        return few + shift + (shape.samples - first) * a_sample

    @property
    def alike(self) -> bool:
        """Whether the same operations ran at all shapes."""
        first, *others = (each.operations for each in self._passes.values())
        return all(first.matches(other) for other in others)

    def memory(self, name: str, shape: Shape) -> float:
        return float(self._at(lambda each: getattr(each.memory, name), shape))

    def rows(self, device: Device, shape: Shape) -> np.ndarray:
        """The arrays of `Work` in its order, (5, 2)."""
        operations = self._passes[self.longest].operations
        factors = self._at(lambda each: each.operations.factors, shape)
        size = self._at(lambda each: each.operations.size, shape)
        computing, moving = factors.prod(1) / device.peak_flops, size / device.bandwidth
        kind = operations.kind
        attention, fused = kind == ATTENTION, kind == FUSED
        bound = (kind == PRODUCT) & (computing >= moving)
        rows = np.zeros((5, 2))
        for column, phase in enumerate((~operations.backward, operations.backward)):
            rows[0, column] = computing[phase & bound].sum()
            rows[1, column] = computing[phase & attention].sum()
            rows[2, column] = moving[phase & ~bound & ~attention & ~fused].sum()
            rows[3, column] = moving[phase & fused].sum()
            rows[4, column] = phase.sum()
        return rows


def _half(number: int) -> int:
    return max(1, number // 2)


@dataclass(frozen=True)
class BlockProfile:
    """Passes in which every decoder block is checkpointed in one way."""

    base: _Passes
    """of a small model"""

    another_block: _Passes
    """of one with one more decoder block"""

    @property
    def alike(self) -> bool:
        return self.base.alike and self.another_block.alike

    def saved(self, shape: Shape) -> tuple[float, float]:
        """(bytes of all but the blocks, bytes of one block) that are kept for the backward pass."""
        base, more = (each.memory("saved", shape) for each in (self.base, self.another_block))
        return base - _BLOCKS * (more - base), more - base

    def rows(self, device: Device, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """(all but the blocks, one block) of `_Passes.rows`."""
        base, more = (each.rows(device, shape) for each in (self.base, self.another_block))
        return base - _BLOCKS * (more - base), more - base


# Blocks of the small model's decoder.
_BLOCKS = 2
# Of the passes. One alone would not do: what is laid out by samples is then not copied.
_SAMPLES = (2, 3)


class Profile:
    """What micro-batches of a config take, whatever their shape."""

    def __init__(
        self,
        args: DiTTTSModelArgs,
        blocks: dict[str, int],
        kind: Callable[[str, Shape], BlockProfile],
        speaker: tuple[_Passes, _Passes],
    ):
        """
        Args:
            args: the model's sizes.
            blocks: checkpointing -> number of decoder blocks.
            kind: gives a checkpointing's passes, with one block of the speaker encoder, for a shape.
            speaker: passes with one and with two of these.
        """
        self._blocks = blocks
        self._kind = kind
        self._speaker = speaker
        self._more_speaker_blocks = args.speaker_n_layers - 1

    def memory(self, shape: Shape) -> ActivationMemory:
        """Bytes of a micro-batch."""
        kinds = {kind: self._kind(kind, shape) for kind in self._blocks}
        saved = {kind: each.saved(shape) for kind, each in kinds.items()}
        # What blocks share is the same in every kind but for what checkpoints hold on to.
        total = max(rest for rest, _ in saved.values())
        total += sum(n * saved[kind][1] for kind, n in self._blocks.items())
        # The speaker encoder's shape has no frames of the utterance and no text.
        one, two = (each.memory("saved", self._speaker_shape(shape)) for each in self._speaker)
        total += self._more_speaker_blocks * (two - one)
        passes = [each.another_block for each in kinds.values()]
        return ActivationMemory(
            batch=round(max(each.memory("batch", shape) for each in passes)),
            saved=round(total),
            working=round(max(each.memory("working", shape) for each in passes)),
        )

    def work(self, device: Device, shape: Shape) -> Work:
        """Time of a micro-batch at full rates."""
        found = {kind: self._kind(kind, shape).rows(device, shape) for kind in self._blocks}
        blocks = sum(n * found[kind][1] for kind, n in self._blocks.items())
        one, two = (each.rows(device, self._speaker_shape(shape)) for each in self._speaker)
        rest = next(iter(found.values()))[0] + self._more_speaker_blocks * (two - one)
        rows = rest + blocks
        return Work(
            product_seconds=rows[0],
            block_share=float(blocks[0].sum() / rows[0].sum()) if rows[0].any() else 1.0,
            attention_seconds=rows[1],
            moving_seconds=rows[2],
            fused_seconds=rows[3],
            kernels=rows[4],
        )

    def _speaker_shape(self, shape: Shape) -> Shape:
        return replace(self._speaker[0].longest, samples=shape.samples)


class Profiler:
    """Makes profiles; passes that configs have in common are run once."""

    def __init__(self, args: DiTTTSModelArgs, longest: Lengths, micro_batch: int):
        """
        Args:
            args: the model's sizes.
            longest: padded lengths of the longest bucket.
            micro_batch: samples of the config's micro-batch in it; shorter ones have as many frames.
        """
        self._args = replace(args, n_layers=_BLOCKS, speaker_n_layers=1)
        self._blocks = args.n_layers
        self._speaker_blocks = args.speaker_n_layers
        self._lengths = longest
        self._micro_batch = micro_batch
        self._kinds: dict[tuple, BlockProfile] = {}
        self._budgets: dict[tuple, BlockProfile] = {}
        self._speakers: dict[tuple, tuple[_Passes, _Passes]] = {}

    def profile(self, config: JobConfig, *, sharded: bool, shorter: bool) -> Profile:
        """
        Args:
            config: says how blocks are checkpointed and whether they are compiled.
            sharded: weights are gathered in the compute dtype (FSDP2); else autocast makes copies.
            shorter: whether it will be asked for other frames and text tokens than the longest.
        """
        compiled = compiled_stacks(config)
        options = config.activation_checkpoint
        blocks = blocks_by_checkpointing(options, self._blocks, compiled="model" in compiled)
        encoders = sharded, tuple(name for name in compiled if name != "model")
        if encoders not in self._speakers:
            two = replace(self._args, speaker_n_layers=2)
            shapes = self._at(self._lengths, _SAMPLES)
            compilers = {shape: ModelCompiler(encoders[1]) for shape in shapes}
            one_block, two_blocks = (
                self._passes(config, args, "none", sharded, shapes, compilers)
                for args in (self._args, two)
            )
            self._speakers[encoders] = one_block, two_blocks

        def kind(name: str, shape: Shape) -> BlockProfile:
            budget = options.memory_budget if name == "memory_budget" else 1.0
            key = name, budget, sharded, compiled, shorter
            if key not in self._kinds:
                self._kinds[key] = self._kind(config, *key)
            # A budget's decisions leap between shapes where autocast's copies of weights are weighed
            # against them: each shape has to be run then.
            if name != "memory_budget" or sharded and self._kinds[key].alike:
                return self._kinds[key]
            lengths = replace(self._lengths, frames=shape.frames, text_tokens=shape.text_tokens)
            key = sharded, compiled, budget, lengths
            if key not in self._budgets:
                self._budgets[key] = self._budget(config, *key)
            return self._budgets[key]

        args = replace(self._args, speaker_n_layers=self._speaker_blocks)
        return Profile(args, blocks, kind, self._speakers[encoders])

    def _at(self, lengths: Lengths, samples: tuple[int, ...]) -> list[Shape]:
        return [Shape(b, lengths.frames, lengths.text_tokens) for b in samples]

    def _kind(
        self,
        config: JobConfig,
        kind: str,
        budget: float,
        sharded: bool,
        compiled: tuple[str, ...],
        shorter: bool,
    ) -> BlockProfile:
        samples = _SAMPLES
        if kind == "memory_budget":  # decided where the run will be
            samples = max(2, self._micro_batch), max(2, self._micro_batch) + 1
        shapes = self._at(self._lengths, samples)
        if shorter:
            one = shapes[0]
            shapes.append(replace(one, frames=_half(one.frames)))
            shapes.append(replace(one, text_tokens=_half(one.text_tokens)))
        compilers = {
            shape: ModelCompiler(compiled, kind == "selective", budget) for shape in shapes
        }
        found = self._profile(config, kind, sharded, shapes, compilers)
        assert found.alike or kind == "memory_budget", "shapes changed which operations run"
        return found

    def _budget(
        self,
        config: JobConfig,
        sharded: bool,
        compiled: tuple[str, ...],
        budget: float,
        lengths: Lengths,
    ) -> BlockProfile:
        samples = max(2, self._micro_batch * self._lengths.frames // lengths.frames)
        # Where the decision leaps from one number of samples to the next, the two after them tell.
        for first in range(samples, samples + 3):
            shapes = self._at(lengths, (first, first + 1))
            compilers = {shape: ModelCompiler(compiled, budget=budget) for shape in shapes}
            found = self._profile(config, "memory_budget", sharded, shapes, compilers)
            if found.alike:
                break
        return found

    def _profile(
        self,
        config: JobConfig,
        kind: str,
        sharded: bool,
        shapes: list[Shape],
        compilers: dict[Shape, ModelCompiler],
    ) -> BlockProfile:
        more = replace(self._args, n_layers=_BLOCKS + 1)
        base, another = (
            self._passes(config, args, kind, sharded, shapes, compilers)
            for args in (self._args, more)
        )
        return BlockProfile(base, another)

    def _passes(
        self,
        config: JobConfig,
        args: DiTTTSModelArgs,
        kind: str,
        sharded: bool,
        shapes: list[Shape],
        compilers: dict[Shape, ModelCompiler],
    ) -> _Passes:
        passes = {}
        for shape in shapes:
            lengths = replace(self._lengths, frames=shape.frames, text_tokens=shape.text_tokens)
            recorder = OperationRecorder()
            memory = measure(
                config,
                args,
                shape.samples,
                lengths,
                kind,
                sharded=sharded,
                compiler=compilers[shape],
                recorder=recorder,
            )
            passes[shape] = _Pass(memory, recorder.operations())
        return _Passes(passes)
