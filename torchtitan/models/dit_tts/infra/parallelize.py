"""Data parallelism for the plain model, after activation checkpointing and compile."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import JobConfig, Parallelism
from torchtitan.models.dit_tts.infra.compat import replicate
from torchtitan.models.dit_tts.infra.compile import (
    apply_compile,
    blocks_compiled,
    stacks,
    static_shapes,
)
from torchtitan.models.dit_tts.infra.kernels import use_operations
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.text.hf_encoder import blocks_of
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

MIN_BUDGET_WITHOUT_MATMULS = 0.8
"""[activation_checkpoint] memory_budget from which on the compiler repeats pointwise work only, as a test
counts in compiled blocks"""


def saved_operations() -> set[Any]:
    """Results that per-op checkpointing saves: matmuls, of which upstream's policy saves every second one;
    fp8 matmuls and the maxima for their scales; attention of every backend."""
    import torch.nn.attention.varlen  # registers torch_attn._varlen_attn, and imports the compiler

    return {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten.max.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.dit_tts.attend_samples.default,
    }


def blocks_by_checkpointing(config: JobConfig, n_layers: int) -> dict[str, int]:
    """Number of the decoder's blocks by the checkpointing that upstream applies: "none", "full", "selective" (by
    operation) or "memory_budget"."""
    options = config.activation_checkpoint
    if options.mode == "selective" and options.selective_ac_option != "op":
        full = n_layers // int(options.selective_ac_option)
        blocks = {"full": full, "none": n_layers - full}
        return {kind: count for kind, count in blocks.items() if count}
    if options.mode == "memory_budget" and not blocks_compiled(config):
        return {"none": n_layers}  # the budget is the compiler's
    return {options.mode: n_layers}


def apply_checkpointing(
    model: nn.Module, config: JobConfig, components: Sequence[str] = ("model", "encoders")
) -> None:
    """Checkpoints the blocks of decoder and trained encoders in place, as upstream does with `layers`."""
    from torchtitan.distributed.activation_checkpoint import apply_ac

    for layers in stacks(model, components):  # the decoder's first: upstream counts every n-th
        apply_ac(
            nn.ModuleDict({"layers": layers}),
            config.activation_checkpoint,
            model_compile_enabled=blocks_compiled(config),
            op_sac_save_list=saved_operations(),
            base_folder=config.job.dump_folder,
        )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_sharded(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Writes this rank's shard of a full initial value."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def is_first_copy(parallel_dims: ParallelDims) -> bool:
    """True if this rank is the first of its tensor-parallel group, whose ranks have the same samples."""
    return not parallel_dims.tp_enabled or parallel_dims.get_mesh("tp").get_local_rank() == 0


def _sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over ranks, not averaged: the loss is already divided by the global
    number of valid frames."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if device_type == "cpu":
                # gloo has no PREMUL_SUM, which FSDP otherwise uses for a divide factor.
                module.set_force_sum_reduction_for_comms(True)


def begin_micro_batch(
    model: nn.Module, parallel_dims: ParallelDims, parallelism: Parallelism, last: bool
) -> None:
    """Sets what the next micro-batch communicates; `last` is the last one of its step. Where complete weights stay, so
    do complete gradients: weights are gathered in the first one, and gradients reduced by the last backward pass. Else
    shards do both in every micro-batch, since they have no memory for complete ones; replicas reduce once."""
    if not isinstance(model, FSDPModule):
        return
    if not (parallel_dims.fsdp_enabled and reshards(parallelism)):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    elif parallel_dims.dp_replicate_enabled:
        model.set_requires_all_reduce(last)


def reshards(parallelism: Parallelism) -> bool:
    """True if a unit's weights are freed after its forward pass."""
    return parallelism.fsdp_reshard_after_forward != "never"


def _units(model: DiTTTSModel) -> Iterator[nn.Module]:
    """Modules whose weights are gathered, and whose gradients are reduced, together: encoders and blocks of the
    decoder, and each block of a pretrained encoder before the encoder itself."""
    if isinstance(model.text_encoder, PretrainedTextEncoder):
        yield from blocks_of(model.text_encoder.core)
    if isinstance(model.text_encoder, nn.Module):
        yield model.text_encoder
    yield from filter(None, (model.speaker_encoder, model.caption_encoder))
    yield from model.layers


def apply_fsdp(
    model: DiTTTSModel,
    mesh: DeviceMesh,
    mixed_precision: MixedPrecisionPolicy,
    parallelism: Parallelism,
    cpu_offload: bool,
) -> None:
    """FSDP2 on a one-dimensional mesh, HSDP on a (replicate, shard) mesh."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    # The backward pass needs the last units again at once.
    last = list(model.layers)[-1]
    for unit in _units(model):
        keep = unit is last or not reshards(parallelism)
        fully_shard(unit, **options, reshard_after_forward=not keep)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)


def parallelize_dit_tts(
    model: DiTTTSModel, parallel_dims: ParallelDims, job_config: JobConfig
) -> DiTTTSModel:
    """Applies kernels, activation checkpointing, then compile, then FSDP2, HSDP or DDP."""
    if job_config.kernels.modulated_norm == "triton":
        from torchtitan.models.dit_tts.infra import triton_norm  # imports triton

        use_operations(model, triton_norm.implementation)
    components = job_config.compile.components if job_config.compile.enable else []
    if job_config.activation_checkpoint.mode != "none":
        apply_checkpointing(model, job_config)
    if components:
        c, shapes = job_config.compile, static_shapes(job_config)
        apply_compile(model, c.backend, shapes, c.mode, components, c.inductor)

    training, parallelism = job_config.training, job_config.parallelism
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(
            model,
            parallel_dims.get_mesh(names),
            # Inputs are not cast: t in bfloat16 would be a different time. The model casts the rest.
            MixedPrecisionPolicy(
                param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
                reduce_dtype=reduce_dtype,
                cast_forward_inputs=False,
            ),
            parallelism,
            cpu_offload=training.enable_cpu_offload,
        )
        logger.info(f"Applied {'HSDP' if parallel_dims.dp_replicate_enabled else 'FSDP2'}")
    elif parallel_dims.dp_replicate_enabled:
        # Mixed precision under DDP is done by autocast, as on a single device.
        mesh = parallel_dims.get_mesh("dp_replicate")
        # One all-reduce per unit overlaps with the backward pass of earlier units.
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for unit in _units(model):
            replicate(unit, mesh=mesh, mp_policy=policy)
        replicate(model, mesh=mesh, mp_policy=policy)
        logger.info("Applied DDP")
    for method in ("encode_conditions", "denoise", "denoise_guided"):  # called by themselves
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    _sum_gradients(model)
    model.write_parameter = write_sharded
    return model
