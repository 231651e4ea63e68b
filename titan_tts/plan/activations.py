"""Bytes that a micro-batch keeps for its backward pass, measured on tensors without data.

The model runs forward and backward on fake tensors on the CPU, whose attention keeps what the fused
kernels of a GPU keep: q, k, v, output and one number per query. A ledger notes when each storage is born
and when it dies. Decoders of two and of three blocks are run; each further block is like the third.
"""

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.utils import set_default_dtype

from titan_tts.plan.compiled_block import BlockCompiler, ModelCompiler
from torchtitan.models.dit_tts import get_train_spec
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.flow.objective import build_flow_loss
from torchtitan.models.dit_tts.infra.compat import FakeTensorMode, TorchDispatchMode, tree_iter
from torchtitan.models.dit_tts.infra.compile import compiled_stacks
from torchtitan.models.dit_tts.infra.parallelize import apply_checkpointing
from torchtitan.models.dit_tts.infra.parallelize_megatron import keep_part
from torchtitan.models.dit_tts.infra.tensor_collectives import Group, divide_frames
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes in addition to weights and their gradients."""

    batch: int
    """the micro-batch itself, with noise, target and text features"""

    saved: int
    """alive between the forward and the backward pass"""

    working: int
    """the maximum that is alive on top of that"""


class StorageLedger(TorchDispatchMode):
    """Notes each storage that operations make, but those of `known` tensors: its bytes, birth and death."""

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self._known = {_key(tensor) for tensor in known}
        self._alive: dict[int, tuple[int, int, weakref.ref]] = {}
        self._dead: list[tuple[int, int, int]] = []
        self._now = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._now += 1
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._note(_key(tensor), tensor.untyped_storage())
        return out

    def _note(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._known or key in self._alive:
            return

        def bury(_: weakref.ref) -> None:
            size, born, _ = self._alive.pop(key)
            self._dead.append((size, born, self._now))

        # A storage's object in Python lives as long as the storage.
        self._alive[key] = storage.nbytes(), self._now, weakref.ref(storage, bury)

    def alive(self) -> int:
        """Bytes that are alive now."""
        return sum(size for size, _, _ in self._alive.values())

    def peak(self, without: Iterable[torch.Tensor]) -> int:
        """Maximum of the bytes that were alive after any operation, without these tensors' storages."""
        left_out = {_key(tensor) for tensor in without}
        changes = np.zeros(self._now + 2, np.int64)
        for size, born, died in self._dead:
            changes[born] += size
            changes[died + 1] -= size
        for key, (size, born, _) in self._alive.items():
            changes[born] += 0 if key in left_out else size
        return int(changes.cumsum().max())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class NoRowsByMask(TorchDispatchMode):
    """Makes rows chosen by a mask none: fake tensors cannot tell how many there are.

    T5Gemma2 replaces the embeddings of image tokens in this way, which texts do not have.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor:
            values, [mask, *others] = args
            if mask is not None and mask.dtype == torch.bool and not others:
                return values.new_empty(0, *values.shape[mask.ndim :])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class KindMemory:
    """Bytes of a micro-batch whose blocks are all checkpointed in one way."""

    batch: int
    shared: int
    """saved by all but the decoder's blocks"""

    block: int
    """saved by one block"""

    working: int
    graphs: list[list[str]]
    """of compiled decoder blocks"""


def kind_memory(
    config: JobConfig,
    args: DiTTTSModelArgs,
    samples: int,
    lengths: Lengths,
    kind: str,
    sharded: bool,
    encoders: dict[tuple[type, bool], BlockCompiler],
) -> KindMemory:
    """
    Args:
        lengths: padded.
        kind: as `blocks_by_checkpointing` names it.
        sharded: weights are gathered in the compute dtype (FSDP2); else autocast makes copies.
        encoders: compilers of encoder blocks, used again by the next call.
    """
    budget = config.activation_checkpoint.memory_budget if kind == "memory_budget" else 1.0
    decoder = BlockCompiler(kind == "selective", budget)
    compiler = ModelCompiler(compiled_stacks(config), decoder, encoders)
    sizes = [replace(args, n_layers=n) for n in (2, 3)]
    shape = samples, lengths, kind
    two, three = (
        measure(config, each, *shape, sharded=sharded, compiler=compiler) for each in sizes
    )
    block = three.saved - two.saved
    shared = two.saved - 2 * block
    return KindMemory(three.batch, shared, block, three.working, decoder.graphs)


def activation_memory(blocks: dict[str, int], kinds: dict[str, KindMemory]) -> ActivationMemory:
    """Bytes of a micro-batch, from the number of blocks and the bytes of each kind."""
    # What blocks share is the same in every kind but for what checkpoints hold on to.
    saved = max(each.shared for each in kinds.values())
    saved += sum(count * kinds[kind].block for kind, count in blocks.items())
    batch = max(each.batch for each in kinds.values())
    return ActivationMemory(batch, saved, max(each.working for each in kinds.values()))


def measure(
    config: JobConfig,
    args: DiTTTSModelArgs,
    samples: int,
    lengths: Lengths,
    checkpointing: str,
    *,
    sharded: bool,
    fake: bool = True,
    compiler: ModelCompiler | None = None,
) -> ActivationMemory:
    """Bytes of one forward and backward pass of a model with exactly these sizes; arguments as in
    `kind_memory`. `fake`: false computes with data, on the CPU."""
    compute_dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    own_dtype = compute_dtype if sharded else TORCH_DTYPE_MAP[config.training.dtype]
    compiler = compiler or ModelCompiler(())
    with contextlib.ExitStack() as modes:
        if fake:
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(NoRowsByMask())
        modes.enter_context(torch.device("cpu"))
        with set_default_dtype(own_dtype):
            model: Any = get_train_spec().model_cls(args)
        tensor, shards = config.parallelism.tensor_parallel_degree, None
        if config.megatron.sequence_parallel:
            shards = Group("", tensor, 0)
        if tensor > 1:
            keep_part(model, tensor, shards)
        compiler.install(model)
        _checkpoint(model, config, checkpointing, compiler.components)
        if shards is not None:
            divide_frames(model, shards)
        batch: dict[str, Any] = _micro_batch(config, args, samples, lengths)
        inputs = list(batch.values())
        if args.text_encoder:
            every_token = np.ones((samples, lengths.text_tokens), bool)
            batch["text_rows"] = model.text_encoder.rows(every_token)
        target = torch.zeros_like(batch["latents"])
        known = [*model.parameters(), *model.buffers(), *inputs, target]
        error_sums = build_flow_loss(config)
        autocast = not sharded and compute_dtype != torch.float32

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", compute_dtype, enabled=autocast):
                return error_sums(model(**batch), target, batch["frame_mask"]).sum()

        traced = -1
        # Tracing makes tensors of its own: such a pass is repeated.
        while traced != compiler.traced:
            traced = compiler.traced
            model.zero_grad()
            with StorageLedger(known) as ledger:
                loss = forward()
                saved = ledger.alive()
                loss.backward()
                del loss
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        peak = ledger.peak(without=gradients)
    # Clean latents and the target are as large as the noisy ones that the model sees.
    size = sum(tensor.nbytes for tensor in inputs) + 2 * target.nbytes
    return ActivationMemory(size, saved, peak - saved)


def _checkpoint(model: nn.Module, config: JobConfig, mode: Any, compiled: Sequence[str]) -> None:
    """Checkpoints blocks as training does, but those of which a compiler's partition decides what is saved."""
    if mode in ("none", "memory_budget"):
        return
    options = replace(
        config.activation_checkpoint,
        mode=mode,
        selective_ac_option="op",
        preserve_rng_state=False,  # fake tensors have none
    )
    stacks = [each for each in ("model", "encoders") if mode == "full" or each not in compiled]
    apply_checkpointing(model, replace(config, activation_checkpoint=options), stacks)


def _micro_batch(
    config: JobConfig, args: DiTTTSModelArgs, samples: int, lengths: Lengths
) -> dict[str, torch.Tensor]:
    """Inputs of the model's forward pass: zeros, without padding."""
    frames, tokens, speaker = lengths.frames, lengths.text_tokens, lengths.speaker_frames

    def full(*shape: int) -> torch.Tensor:
        return torch.ones(samples, *shape, dtype=torch.bool)

    batch = {
        "latents": torch.zeros(samples, frames, args.latent_channels),
        "t": torch.zeros(samples),
        "frame_mask": full(frames),
        "text_ids": torch.zeros(samples, tokens, dtype=torch.long),
        "text_mask": full(tokens),
        "text_positions": torch.zeros(samples, tokens),
        "speaker": torch.zeros(samples, speaker, args.latent_channels),
        "speaker_mask": full(speaker),
        "keep_text": full(),
        "keep_speaker": full(),
    }
    if not (args.text_vocab_size or args.text_encoder):
        encoder = config.encoder
        dtype = (encoder.cache_features and encoder.cache_dtype) or encoder.dtype
        batch["text_features"] = torch.zeros(
            samples, tokens, args.text_dim, dtype=TORCH_DTYPE_MAP[dtype]
        )
    return batch
