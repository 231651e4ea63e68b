"""Compiles the blocks of decoder and trained encoders in place, a frozen text encoder, and the objective's functions.

The blocks of a stack are alike, so they share one graph per static shape. The packed rows of a pretrained text
encoder have a shape per batch, so its blocks share few graphs for any shape.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra import compat
from torchtitan.models.dit_tts.model.encoders import ByteEncoder, SpeakerEncoder
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.text.hf_encoder import blocks_of
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.tools.logging import logger

_MAX_READS = 5
"""Maximum number of readers for which Inductor recomputes a value instead of storing it in float32. The
gradient of a rotated and normed query has 5, one more than Inductor's default; this saves 7 % of a block's
pointwise traffic."""

_PRETRAINED_GRAPHS = 8
"""Maximum number of graphs of a pretrained encoder's blocks: of two kinds (sliding and full attention), each
with and without checkpointing, for one row and for several"""


_ROW_COUNTS = 32
"""Maximum number of graphs of a frozen text encoder that reads packed rows: two for each doubling of their number"""


def static_shapes(config: JobConfig) -> int:
    """Maximum number of micro-batch shapes: one per bucket (packed: one)."""
    buckets = len(config.data.bucket_frames) or config.data.num_buckets
    if config.data.batching == "packed":
        buckets = 1
    return buckets


def blocks_compiled(config: JobConfig) -> bool:
    """True if training compiles the decoder's blocks, and not the loss alone."""
    return "model" in compiled_stacks(config)


def compiled_stacks(config: JobConfig) -> tuple[str, ...]:
    """The [compile] components that are stacks of blocks and that training compiles."""
    named = ("model", "encoders") if config.compile.enable else ()
    return tuple(name for name in named if name in config.compile.components)


def stacks(model: nn.Module, components: Sequence[str]) -> list[nn.ModuleList]:
    """The stacks of blocks of [compile] components; a frozen text encoder is outside the model."""
    found = [cast(nn.ModuleList, model.layers)] if "model" in components else []
    if "encoders" in components:
        for encoder in (model.speaker_encoder, model.text_encoder, model.caption_encoder):
            if isinstance(encoder, (SpeakerEncoder, ByteEncoder)):
                found.append(encoder.layers)
        found += _pretrained_stacks(model)
    return found


def _pretrained_stacks(model: nn.Module) -> list[nn.ModuleList]:
    encoder = model.text_encoder
    return [blocks_of(encoder.core)] if isinstance(encoder, PretrainedTextEncoder) else []


def apply_compile(
    model: nn.Module,
    backend: str | Callable,
    shapes: int,
    mode: str = "default",
    components: Sequence[str] = ("model",),
    inductor: Sequence[str] = (),
) -> None:
    """Compiles each block in place, since a wrapper around it would bypass FSDP's hooks.

    Args:
        model: its blocks may be wrapped by activation checkpointing, but not sharded yet.
        shapes: maximum number of static shapes of the data.
        mode: of torch.compile; only the backend "inductor" has modes.
        components: "model" (the decoder's blocks) and "encoders" (the trained encoders' blocks).
        inductor: its options that are on.
    """
    compiled, pretrained = stacks(model, components), _pretrained_stacks(model)
    # Times 2 for training and evaluation mode. Blocks with and without checkpointing are separate
    # code objects with limits of their own; the blocks of both encoders share one.
    _allow_graphs(2 * shapes * len(compiled) + 2 * _PRETRAINED_GRAPHS * len(pretrained))
    for layers in compiled:
        _compile_blocks(layers, backend, mode, inductor, dynamic=layers in pretrained)
    logger.info(
        f"Compiling each block of {len(compiled)} stacks in place with {backend}, mode {mode}"
    )


def compile_for_any_lengths(model: DiTTTSModel, backend: str | Callable = "inductor") -> None:
    """Compiles the decoder's blocks in place for a sampler, whose batches have any number of rows and any
    lengths."""
    # One or several copies of one or several rows, each with or without padding; and each of several models
    # that are compared has its own.
    _allow_graphs(compat.dynamo_config.recompile_limit + 32)
    # Sizes that are equal by chance (64 frames, 64 channels of a head) are not taken for the same, which
    # would be another graph for batches where they differ.
    compat.symbolic_shapes.use_duck_shape = False
    _compile_blocks(model.layers, backend, "default", dynamic=True)


def _compile_blocks(
    blocks: nn.ModuleList,
    backend: str | Callable,
    mode: str,
    inductor: Sequence[str] = (),
    *,
    dynamic: bool,
) -> None:
    options = _options(backend, mode, inductor)
    for block in blocks:
        block.compile(backend=backend, options=options, fullgraph=True, dynamic=dynamic)


def _options(backend: str | Callable, mode: str, inductor: Sequence[str]) -> dict[str, Any] | None:
    if backend != "inductor":
        return None
    options = {**compat.list_mode_options(mode), "realize_reads_threshold": _MAX_READS}
    return options | dict.fromkeys(inductor, True)


def compile_function(function: Callable, backend: str | Callable, shapes: int) -> Callable:
    """Compiles one of the objective's functions, for at most `shapes` static shapes. [compile] mode does not
    apply, since they have no matmuls."""
    _allow_graphs(shapes)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def compile_frozen(encoder: PretrainedTextEncoder, config: JobConfig) -> None:
    """Compiles a frozen text encoder, if [compile] names it, as one graph for each number of rows. It is whole on every rank
    and has no backward pass, so CUDA graphs ([compile] mode) may replay it in any layout."""
    c = config.compile
    if not c.enable or "text_encoder" not in c.components:
        return
    encoder.longest = config.data.max_text_tokens
    _allow_graphs(max(_ROW_COUNTS, static_shapes(config)))
    options = _options(c.backend, c.mode, c.inductor)
    # Not fullgraph: an encoder may be of any architecture.
    hidden = torch.compile(encoder.hidden, backend=c.backend, options=options, dynamic=False)
    encoder.hidden = hidden  # type: ignore[method-assign]


def _allow_graphs(count: int) -> None:
    """Raises Dynamo's limits of graphs per code object; beyond them fullgraph is an error."""
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(compat.dynamo_config, limit, max(getattr(compat.dynamo_config, limit), count))


def compiled_graphs() -> int:
    """Number of graphs that Dynamo has compiled in this process so far."""
    return compat.dynamo_counters["stats"]["unique_graphs"]
