"""Tensor parallelism by Megatron-Core's layers: `[parallelism] backend = "megatron"`.

The heads of the decoder's attention and the units of its MLPs are split over the ranks of the mesh's "tp"
dimension: the projections into them by rows, those out of them by columns (Shoeybi et al. 2019, arXiv
1909.08053). Everything else is computed by each of these ranks alike, from the same batch.

Every parameter is a DTensor of that mesh, and every module computes with this rank's part of its own. So
FSDP2, HSDP, DDP, optimizers, clipping, EMA and checkpoints work as in `parallelize`, and any layout loads a
checkpoint of any other.

A block sums activations over the ranks after attention and MLP, and gradients before them. The gradients of
text and speaker are summed once, for all blocks. With `[megatron] sequence_parallel` the sums leave each rank
its part of the frames, so what is between attention and MLP is divided too.
"""

from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import JobConfig, Megatron
from torchtitan.models.dit_tts.errors import require_modules
from torchtitan.models.dit_tts.infra.compile import compiled_stacks, stacks
from torchtitan.models.dit_tts.infra.matmul_weights import projections, weight_of
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.infra.tensor_collectives import (
    Group,
    SequenceColumn,
    SequenceRow,
    divide_frames,
    group_of,
    sum_gradients,
)
from torchtitan.models.dit_tts.model.attention import JointAttention, rotated_groups
from torchtitan.models.dit_tts.model.attention_backends import VarlenKeys
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.tools.logging import logger


def parallelize_megatron(
    model: DiTTTSModel, parallel_dims: ParallelDims, job_config: JobConfig
) -> DiTTTSModel:
    """Changes the decoder's layers and splits them over the ranks of the mesh's "tp" dimension, then does what
    `parallelize_dit_tts` does."""
    options = job_config.megatron
    mesh = parallel_dims.get_mesh("tp") if parallel_dims.tp_enabled else None
    shards = None
    require_modules("megatron", *(("transformer_engine",) if _wants_te(options) else ()))
    if mesh is not None:
        if options.sequence_parallel:
            shards = group_of(mesh.get_group())
        apply_tensor_parallel(model, mesh, options, shards)
        kinds = "tensor and sequence" if shards else "tensor"
        logger.info(f"Applied {kinds} parallelism over {mesh.size()} ranks")
    elif _wants_te(options):
        for layer, plain in _use_te_layers(model, None, options.fp8).items():
            layer._parameters["weight"] = weight_of(plain)
    if options.use_te_attn:
        _attend_by_te(model, 1 if mesh is None else mesh.size())
    parallelize_dit_tts(model, parallel_dims, job_config)
    if mesh is not None:
        for layers in stacks(model, compiled_stacks(job_config)):
            for block in layers:
                hand_in_parts(block)
    if shards is not None:
        divide_frames(model, shards)
    return model


def _wants_te(options: Megatron) -> bool:
    return options.transformer_impl == "transformer_engine"


def apply_tensor_parallel(
    model: DiTTTSModel, mesh: DeviceMesh, options: Megatron, shards: Group | None = None
) -> None:
    """Splits the decoder in place. The ranks must have the same values in the parameters, or be on the meta
    device. With `shards` its blocks take this rank's frames."""
    group = mesh.get_group()
    # With a group of another size Megatron would build complete layers, and say nothing.
    assert group.size() == mesh.size() > 1
    placements = split_parameters(model)
    replaced: dict[nn.Module, nn.Linear] = {}
    if _wants_te(options):
        replaced = _use_te_layers(model, group, options.fp8)
    else:
        _use_megatron_layers(model, group)
    if shards is not None:
        use_sequence_layers(model, shards)
    split: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in own_parameters(replaced.get(module, module)).items():
            if parameter not in split:  # two modules can share one
                placement = [placements.get(parameter, Replicate())]
                value = distribute_tensor(parameter.detach(), mesh, placement, src_data_rank=None)
                split[parameter] = nn.Parameter(value, parameter.requires_grad)
            module._parameters[name] = split[parameter]
        compute_locally(module)
    encoders = filter(None, (model.speaker_encoder, model.caption_encoder))
    for stream in (model.text_norm, *(cast(nn.Module, each.norm) for each in encoders)):
        _sum_gradients_of(stream, group_of(group))
    model.rotated = rotated_groups(model.args.n_heads, mesh.size(), mesh.get_local_rank())


def split_parameters(model: nn.Module) -> dict[nn.Parameter, Placement]:
    """The split of the plain model's parameters that differ between ranks."""
    found: dict[nn.Parameter, Placement] = {}
    for module, name, parts, _ in projections(model):
        layer = getattr(module, name)
        found[weight_of(layer)] = Shard(0 if parts > 1 else 1)
        if isinstance(module, JointAttention):
            found |= {weight_of(norm): Shard(0) for norm in (module.q_norm, module.k_norm)}
    return found


def use_sequence_layers(model: nn.Module, shards: Group) -> None:
    """Lets the layers between frames and heads or units gather and divide the frames."""
    for block in cast(nn.ModuleList, model.layers):
        # Shift, scale and gate act on this rank's frames.
        _sum_gradients_of(cast(nn.Module, block.adaln), shards)
    for module, name, parts, _ in projections(model):
        if _sums_gradient(name):
            layer = getattr(module, name)
            layer.__class__ = SequenceColumn if parts > 1 else SequenceRow
            layer.group = shards


def _use_megatron_layers(model: DiTTTSModel, group: dist.ProcessGroup) -> None:
    """Lets the plain layers compute as Megatron's do. Their parameters and names stay."""
    from torchtitan.models.dit_tts.infra.megatron_layers import MegatronColumn, MegatronRow

    for module, name, parts, _ in projections(model):
        layer = getattr(module, name)
        layer.group = group
        if parts > 1:
            layer.__class__ = MegatronColumn
            layer.summed = group_of(group) if _sums_gradient(name) else None
        else:
            layer.__class__ = MegatronRow


def _use_te_layers(
    model: DiTTTSModel, group: dist.ProcessGroup | None, fp8: bool
) -> dict[nn.Module, nn.Linear]:
    """Replaces the plain layers by TransformerEngine's, on the meta device. Returns the plain layer of each."""
    from torchtitan.models.dit_tts.infra import transformer_engine_layers as te

    replaced: dict[nn.Module, nn.Linear] = {}
    for module, name, parts, _ in list(projections(model)):
        plain = getattr(module, name)
        if parts > 1:
            layer = te.TransformerEngineColumn(plain, group, _sums_gradient(name), fp8)
        else:
            layer = te.TransformerEngineRow(plain, group, fp8)
        setattr(module, name, layer)
        replaced[layer] = plain
    return replaced


def _sums_gradient(name: str) -> bool:
    """True if a layer sums the gradient of its input. The gradients of text and speaker are summed where all
    blocks' come together, by `_sum_gradients_of`."""
    return not name.endswith("_kv")


def _attend_by_te(model: DiTTTSModel, ranks: int) -> None:
    """Lets the decoder attend to packed keys by TransformerEngine."""
    from torchtitan.models.dit_tts.infra.transformer_engine_layers import packed_attention_kernel

    args = model.args
    kernel = packed_attention_kernel(args.n_heads // ranks, args.dim // args.n_heads)

    def with_kernel(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, rope, keys, conditions = args
        keys = keys._replace(kernel=kernel) if isinstance(keys, VarlenKeys) else keys
        return x, rope, keys, conditions

    for module in cast(nn.ModuleList, model.layers).modules():
        if isinstance(module, JointAttention):
            module.register_forward_pre_hook(with_kernel)


def _sum_gradients_of(module: nn.Module, group: Group) -> None:
    """Sums the gradient of the module's output over the ranks, of which each computes a part."""
    module.register_forward_hook(lambda module, args, output: sum_gradients(output, group))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module itself, without its children's."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def compute_locally(module: nn.Module) -> None:
    """Lets the module's attributes be this rank's parts of its own parameters, by a class with a property for
    each. `parameters()` and state dicts have the DTensors."""
    if names := tuple(own_parameters(module)):
        module.__class__ = _local_class(type(module), names)  # type: ignore[arg-type]


@cache
def _local_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def of(name: str) -> property:
        def read(module: Any) -> torch.Tensor:
            parts = module.parts_in_compute
            return _part(module._parameters[name]) if parts is None else parts[name]

        return property(read)

    members: dict[str, Any] = {name: of(name) for name in names}
    # Messages and the compiler's logs have the class's own name.
    return type(kind.__name__, (kind,), {**members, "parts_in_compute": None})


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter. FSDP2 also asks for sharded ones, and gets them as they are."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("tp",):
        return parameter.to_local()
    return parameter


def hand_in_parts(block: nn.Module) -> None:
    """Takes the parts of a compiled block's parameters before the block runs. Inside, the mesh would be in the
    graph, which neither full checkpointing nor a memory budget can save. To be called last, since hooks that were
    registered before gather the parameters."""
    owners = [module for module in block.modules() if own_parameters(module)]

    @torch.compiler.disable  # what the compiled block's hooks call would be a graph of its own
    def take(_: nn.Module, args: Any) -> None:
        for owner in owners:
            found = own_parameters(owner).items()
            parts = {name: _part(value) for name, value in found}
            for part in parts.values():
                torch._dynamo.mark_static(part)  # as parameters are where a block takes any lengths
            owner.parts_in_compute = parts  # type: ignore[assignment]

    @torch.compiler.disable
    def leave(_: nn.Module, args: Any, output: Any) -> None:
        for owner in owners:
            owner.parts_in_compute = None  # type: ignore[assignment]

    block.register_forward_pre_hook(take)
    block.register_forward_hook(leave, always_call=True)
