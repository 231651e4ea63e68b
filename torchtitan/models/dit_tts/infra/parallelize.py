"""Data parallelism for the plain model, after activation checkpointing and compile."""

from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch_attn._varlen_attn
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
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
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.compile import apply_compile, static_shapes
from torchtitan.models.dit_tts.text.hf_encoder import blocks_of
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

# What per-op checkpointing keeps: of the products, which cost most to compute again, upstream's policy
# takes every second one; fp8's, the maxima that these scale by, and attention by every backend.
SAVED_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.max.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch._higher_order_ops.flex_attention,
}


def write_sharded(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Writes this rank's part of a whole initial value."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def _sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over ranks, not averaged: the loss is already divided by the global
    number of valid frames."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if device_type == "cpu":
                # gloo has no PREMUL_SUM, which a divide factor otherwise uses
                module.set_force_sum_reduction_for_comms(True)


def reduce_gradients(model: nn.Module, parallel_dims: ParallelDims, now: bool) -> None:
    """Says whether the coming backward pass ends an accumulation (`now`).

    Replicas then exchange gradients once a step, not once a micro-batch. Shards are reduced each time:
    whole gradients kept between would undo the sharding.
    """
    if not parallel_dims.dp_replicate_enabled:
        return
    if parallel_dims.fsdp_enabled:
        model.set_requires_all_reduce(now)
    else:
        model.set_requires_gradient_sync(now)


def _blocks_of_encoder(unit: nn.Module) -> list[nn.Module]:
    """Blocks of a pretrained encoder, each large enough for a unit of its own; else none."""
    return list(blocks_of(unit.core)) if isinstance(unit, PretrainedTextEncoder) else []


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    mixed_precision: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    cpu_offload: bool,
) -> None:
    """FSDP2 on a one-dimensional mesh, HSDP on a (replicate, shard) mesh; one unit a block."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for encoder in (model.text_encoder, model.speaker_encoder):
        if encoder is not None:
            for block in _blocks_of_encoder(encoder):
                fully_shard(block, **options, reshard_after_forward=reshard_after_forward)
            fully_shard(encoder, **options, reshard_after_forward=reshard_after_forward)
    for layer in model.layers:
        fully_shard(layer, **options, reshard_after_forward=reshard_after_forward)
    # The last unit is needed again at once by the backward pass.
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    for method in ("encode_conditions", "denoise"):
        register_fsdp_forward_method(model, method)


def parallelize_dit_tts(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Applies activation checkpointing, then compile, then FSDP2, HSDP or DDP."""
    components = job_config.compile.components if job_config.compile.enable else []
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled="model" in components,
            op_sac_save_list=SAVED_OPERATIONS,
            base_folder=job_config.job.dump_folder,
        )
    if components:
        config, shapes = job_config.compile, static_shapes(job_config.data)
        apply_compile(model, config.backend, shapes, config.mode, components)

    training = job_config.training
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(
            model,
            parallel_dims.get_mesh(names),
            # Inputs stay as they are: time in bfloat16 would be a different time. The model casts.
            MixedPrecisionPolicy(
                param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
                reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
                cast_forward_inputs=False,
            ),
            reshard_after_forward=job_config.parallelism.fsdp_reshard_after_forward != "never",
            cpu_offload=training.enable_cpu_offload,
        )
        logger.info(f"Applied {'HSDP' if parallel_dims.dp_replicate_enabled else 'FSDP2'}")
    elif parallel_dims.dp_replicate_enabled:
        # Mixed precision under DDP is autocast's, as on a single device.
        mesh = parallel_dims.get_mesh("dp_replicate")
        for unit in (model.text_encoder, model.speaker_encoder, *model.layers):
            if unit is not None:
                # One all-reduce a unit, beside the backward pass of the units before it.
                for block in _blocks_of_encoder(unit):
                    replicate(block, mesh=mesh)
                replicate(unit, mesh=mesh)
        replicate(model, mesh=mesh)
        logger.info("Applied DDP")
    _sum_gradients(model)
    model.write_parameter = write_sharded
    return model
