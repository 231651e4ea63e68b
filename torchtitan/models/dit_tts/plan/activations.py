"""Bytes that one micro-batch keeps for its backward pass, measured on tensors without data.

The model runs forward and backward as fake tensors on the CPU, whose attention keeps what the fused
kernels of a GPU keep: q, k, v, output and one number a query. A ledger notes when each storage is
born and when it dies. Two and three blocks are run; the others are like the third.
"""

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.job_config import ActivationCheckpoint, Compile
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts import get_train_spec
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.flow.objective import squared_error_sum
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.plan.compiled_block import ModelCompiler
from torchtitan.models.dit_tts.plan.operations import OperationRecorder
from torchtitan.models.dit_tts.plan.storage_ledger import StorageLedger
from torchtitan.tools.utils import set_default_dtype


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes beside weights and their gradients."""

    batch: int
    """the micro-batch itself, with noise, target and text features"""

    saved: int
    """alive between the forward and the backward pass"""

    working: int
    """most that is alive at once on top of that"""


class NoRowsByMask(TorchDispatchMode):
    """Rows chosen by a mask are none, where fake tensors cannot tell how many there are.

    T5Gemma2 replaces the embeddings of image tokens in this way, which texts do not have.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor:
            values, [mask, *others] = args
            if mask is not None and mask.dtype == torch.bool and not others:
                return values.new_empty(0, *values.shape[mask.ndim :])
        return func(*args, **(kwargs or {}))


def activation_memory(
    config: JobConfig, args: DiTTTSModelArgs, samples: int, lengths: Lengths, *, sharded: bool
) -> ActivationMemory:
    """Bytes of a micro-batch in eager mode, under the config's activation checkpointing.

    Args:
        config: the run's.
        args: the model's sizes.
        samples: in the micro-batch.
        lengths: padded lengths of its samples.
        sharded: weights are gathered in the compute dtype (FSDP2); else autocast makes copies.
    """
    fixed = blocks = working = batch = 0
    options = config.activation_checkpoint
    for kind, layers in blocks_by_checkpointing(options, args.n_layers, compiled=False).items():
        two, three = (
            measure(config, replace(args, n_layers=n), samples, lengths, kind, sharded=sharded)
            for n in (2, 3)
        )
        block = three.saved - two.saved
        # What blocks share is the same in every mode but for what checkpoints hold on to.
        fixed = max(fixed, two.saved - 2 * block)
        blocks += layers * block
        working = max(working, three.working)
        batch = three.batch
    return ActivationMemory(batch, fixed + blocks, working)


def blocks_by_checkpointing(
    options: ActivationCheckpoint, n_layers: int, *, compiled: bool
) -> dict[str, int]:
    """How many blocks are checkpointed in which way, as upstream does it: "none", "full", "selective",
    which is by operation, or "memory_budget"."""
    if options.mode == "selective" and options.selective_ac_option != "op":
        whole = n_layers // int(options.selective_ac_option)
        blocks = {"full": whole, "none": n_layers - whole}
    elif options.mode in ("full", "selective"):
        blocks = {options.mode: n_layers}
    elif options.mode == "memory_budget" and compiled:
        blocks = {"memory_budget": n_layers}
    else:  # a memory budget is the compiler's: without it nothing is computed again
        blocks = {"none": n_layers}
    return {kind: count for kind, count in blocks.items() if count}


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
    recorder: OperationRecorder | None = None,
) -> ActivationMemory:
    """One forward and backward pass of a model with these sizes.

    Args:
        config: the run's.
        args: the model's sizes.
        samples: in the micro-batch.
        lengths: padded lengths of its samples.
        checkpointing: of every block, as `blocks_by_checkpointing` names it.
        sharded: as in `activation_memory`.
        fake: false computes with data, on the CPU.
        compiler: blocks run as it compiles them.
        recorder: takes note of the operations.
    """
    compute_dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    own_dtype = compute_dtype if sharded else TORCH_DTYPE_MAP[config.training.dtype]
    with contextlib.ExitStack() as modes:
        if fake:
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(NoRowsByMask())
        modes.enter_context(torch.device("cpu"))
        with set_default_dtype(own_dtype):
            model = get_train_spec().model_cls(args)
        made = compiler is None or compiler.install(model)
        decoder_compiled = compiler is not None and compiler.decoder
        by_partition = decoder_compiled and checkpointing in ("selective", "memory_budget")
        model = _checkpointed(model, config, "none" if by_partition else checkpointing)
        batch = _micro_batch(config, args, samples, lengths)
        inputs = list(batch.values())
        if args.text_encoder:
            every_token = np.ones((samples, lengths.text_tokens), bool)
            batch["text_rows"] = model.text_encoder.rows(every_token)
        target = torch.zeros_like(batch["latents"])
        known = [*model.parameters(), *model.buffers(), *inputs, target]
        autocast = not sharded and compute_dtype != torch.float32

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", compute_dtype, enabled=autocast):
                return squared_error_sum(model(**batch), target, batch["frame_mask"])

        if not made:
            forward().backward()
            model.zero_grad()
        recorder = recorder or OperationRecorder()
        with StorageLedger(known) as ledger, recorder:
            if compiler is not None:
                compiler.watch(ledger, recorder)
            loss = forward()
            saved = ledger.alive()
            recorder.backward = True
            loss.backward()
            del loss
        if compiler is not None:
            compiler.watch(None, None)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        peak = ledger.peak(without=gradients)
    # Clean latents and the target are as large as the noisy ones that the model sees.
    size = sum(tensor.nbytes for tensor in inputs) + 2 * target.nbytes
    return ActivationMemory(size, saved, peak - saved)


def _checkpointed(model: nn.Module, config: JobConfig, mode: str) -> nn.Module:
    """The model with activation checkpointing as training applies it, on one rank."""
    options = replace(
        config.activation_checkpoint,
        mode=mode,
        selective_ac_option="op",
        preserve_rng_state=False,  # fake tensors have none
    )
    plain = replace(config, activation_checkpoint=options, compile=Compile())
    alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    return get_train_spec().parallelize_fn(model, alone, plain)


def _micro_batch(
    config: JobConfig, args: DiTTTSModelArgs, samples: int, lengths: Lengths
) -> dict[str, torch.Tensor]:
    """What the model's forward pass is given, all zeros and without padding."""
    frames, tokens, speaker = lengths.frames, lengths.text_tokens, lengths.speaker_frames

    def full(*shape: int) -> torch.Tensor:
        return torch.ones(samples, *shape, dtype=torch.bool)

    batch = {
        "latents": torch.zeros(samples, frames, args.latent_channels),
        "t": torch.zeros(samples),
        "frame_mask": full(frames),
        "text_ids": torch.zeros(samples, tokens, dtype=torch.long),
        "text_mask": full(tokens),
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
