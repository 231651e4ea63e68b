"""Bytes per GPU of weights, gradients, optimizer, EMA and a frozen text encoder.

The model is built on the meta device and sharded by the function that training uses, over a fake process
group; then the shards are counted.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.tools.utils import set_default_dtype

from titan_tts.plan.parameters import build_on_meta
from torchtitan.models.dit_tts import get_train_spec
from torchtitan.models.dit_tts.config.job_config import JobConfig, Megatron, Optimizer
from torchtitan.models.dit_tts.infra.compile import stacks
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights, weight_of
from torchtitan.models.dit_tts.infra.parallelize import local_tensor
from torchtitan.models.dit_tts.infra.text_encoder import shard_if_large
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

_FLOAT32 = 4
_8BIT_BLOCK = 256
"""numbers of an 8-bit moment that share a scale"""


@dataclass(frozen=True)
class DataParallelLayout:
    """Data-parallel ranks, replicas times shards, each of them `tensor` GPUs that share its samples."""

    replicas: int
    shards: int
    tensor: int = 1

    @property
    def gpus(self) -> int:
        return self.replicas * self.shards * self.tensor

    @property
    def name(self) -> str:
        tensor = f"TP {self.tensor}" if self.tensor > 1 else ""
        if self.replicas * self.shards == 1:
            return tensor or "one GPU"
        kind = "FSDP2" if self.replicas == 1 else "HSDP"
        data = "DDP" if self.shards == 1 else kind
        return f"{tensor} x {data}" if tensor else data

    @property
    def sharded(self) -> bool:
        return self.shards > 1


@dataclass(frozen=True)
class UnshardedWeights:
    """Bytes of the complete weights that a sharded module has in addition to its shards."""

    kept: int
    """of units that stay gathered after their forward pass"""

    transient: int
    """of the others, at most: the one that is used and those that are fetched meanwhile"""

    @property
    def total(self) -> int:
        return self.kept + self.transient


@dataclass(frozen=True)
class StateMemory:
    """Bytes of the rank that holds the most."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    gathered: UnshardedWeights
    unsharded_gradients: int
    """complete gradients of the largest unit and the input of their reduce-scatter"""

    encoder: int
    """a frozen text encoder outside the model"""

    encoder_gathered: UnshardedWeights
    encoder_units: int
    """of a sharded one, gathered one after another; 0: not sharded"""

    teacher: int
    """a frozen network like the model, with its gathered weights"""

    offloaded: bool
    """the lasting ones are in the machine's memory, not the GPU's"""

    units: int = 1
    """of the model, gathered or reduced one after another"""

    first: float = 1.0
    """fraction of the parameters in the units up to the decoder's first: a forward pass begins with them, and a
    backward pass ends with them"""

    trained_fraction: float = 1.0
    """of the parameters"""

    @property
    def lasting(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema

    @property
    def on_gpu(self) -> int:
        """Whatever the batch."""
        lasting = 0 if self.offloaded else self.lasting
        whole = self.gathered.total + self.unsharded_gradients
        return lasting + whole + self.encoder + self.encoder_gathered.total + self.teacher


@contextlib.contextmanager
def fake_process_group(layout: DataParallelLayout) -> Iterator[ParallelDims]:
    """The first rank of a layout, as the only process; collectives do nothing."""
    assert not dist.is_initialized(), "a process group would be replaced"
    degrees: Any = {"dp_replicate": layout.replicas, "dp_shard": layout.shards}
    degrees |= {"tp": layout.tensor, **dict.fromkeys(("cp", "pp", "ep", "etp"), 1)}
    dims = ParallelDims(**degrees, world_size=layout.gpus)
    if layout.gpus == 1:
        yield dims
        return
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=layout.gpus)
    # Upstream builds its mesh of accelerators where there are any, of whatever number.
    device_type, parallel_dims.device_type = parallel_dims.device_type, "cpu"
    try:
        dims.build_mesh()
        yield dims
    finally:
        parallel_dims.device_type = device_type
        dist.destroy_process_group()


def state_memory(
    config: JobConfig,
    args: DiTTTSModelArgs,
    source: HFEncoderSpec | None,
    layout: DataParallelLayout,
) -> StateMemory:
    """Bytes per GPU of lasting states and of unsharded weights and gradients."""
    # None of these changes where parameters lie.
    plain = replace(
        config,
        megatron=Megatron(),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=replace(config.compile, enable=False),
    )
    model = build_on_meta(args, config.training.dtype)
    with fake_process_group(layout) as dims:
        model = get_train_spec().parallelize_fn(model, dims, plain)
        trained = [local_tensor(p) for p in model.parameters() if p.requires_grad]
        weights = _padded_bytes(model)
        decoder = [*stacks(model, ["model"])[0], model.norm]
        ahead = config.parallelism.fsdp_prefetch_units
        gathered, sizes = _gathered(model, decoder, max(1, ahead))
        frozen_encoder = _frozen_encoder(config, source, dims)
        optimizer = _optimizer(model, config.optimizer)
    local = sum(parameter.nbytes for parameter in trained)
    averages = len(config.ema.decays) if config.ema.enable else 0
    ema = averages * _FLOAT32 * sum(parameter.numel() for parameter in trained)
    training = config.training
    transient = 0
    if layout.sharded:
        largest = max(each for kind in sizes.values() for each in kind)
        compute = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
        transient = largest * (compute + TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize)
    offloaded = training.enable_cpu_offload and layout.sharded
    teacher = (0 if offloaded else weights) + gathered.total if args.teacher_passes else 0
    outer, inner = sizes[False], sizes[True] or [0]
    return StateMemory(
        *(weights, local, optimizer, ema, gathered, transient, *frozen_encoder, teacher, offloaded),
        units=len(outer + inner),
        trained_fraction=sum(p.numel() for p in trained)
        / sum(local_tensor(p).numel() for p in model.parameters()),
        first=(sum(outer) + max(inner)) / max(1, sum(outer + inner)),
    )


def _padded_bytes(module: nn.Module) -> int:
    """FSDP2 pads each shard of a parameter to the length of the longest."""
    return sum(local_tensor(p).untyped_storage().nbytes() for p in module.parameters())


def _optimizer(model: nn.Module, options: Optimizer) -> int:
    """Two moments of each trained parameter and a float32 step count; Muon has one moment of block matrices."""
    muon = set(map(weight_of, matmul_weights(model))) if options.name == "Muon" else set()
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        local = local_tensor(parameter)
        numbers = local.numel()
        if parameter in muon:
            total += local.nbytes
            continue
        total += _FLOAT32
        if options.state_dtype == "bfloat16":
            total += 2 * torch.bfloat16.itemsize * numbers
        elif options.state_dtype == "8bit" and numbers >= 4096 and numbers % _8BIT_BLOCK == 0:
            # What torchao quantises: a byte per number, a float32 scale per block, and each moment's table of 256 values.
            total += 2 * (numbers + _FLOAT32 * (numbers // _8BIT_BLOCK + 256))
        else:
            total += 2 * local.nbytes
    return total


def _frozen_encoder(
    config: JobConfig, source: HFEncoderSpec | None, dims: ParallelDims
) -> tuple[int, UnshardedWeights, int]:
    """(bytes, gathered weights and units of a sharded one) of an encoder outside the model."""
    encoder = config.encoder
    if source is None or not encoder.frozen or encoder.cache_features:
        return 0, UnshardedWeights(0, 0), 0
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[encoder.dtype]):
        module = PretrainedTextEncoder(source).requires_grad_(False)
    size = sum(parameter.nbytes for parameter in module.parameters())
    if not shard_if_large(module, encoder, dims):
        return size, UnshardedWeights(0, 0), 0
    units = sum(isinstance(each, FSDPModule) for each in module.modules())
    return _padded_bytes(module), _gathered(module)[0], units


def _gathered(
    root: nn.Module, decoder: Collection[nn.Module] = (), ahead: int = 1
) -> tuple[UnshardedWeights, dict[bool, list[int]]]:
    """(gathered weights under FSDP2, HSDP or `replicate`, numbers in each unit by whether it is the decoder's).
    `ahead`: number of the decoder's units that are fetched ahead."""
    kept, transient = 0, 0
    sizes: dict[bool, list[int]] = {False: [], True: []}
    seen = set()
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Not public: which parameters form a unit, and whether they stay gathered.
        state = module._get_fsdp_state()
        group = state._fsdp_param_group
        if group is None or group in seen:
            continue
        seen.add(group)
        count = size = 0
        for entry in group.fsdp_params:
            dtype = entry.mp_policy.param_dtype or entry.sharded_param.dtype
            number = entry._orig_size.numel()  # of this rank's part under tensor parallelism
            count += number
            size += number * dtype.itemsize
        stays = group.post_forward_mesh_info is None
        if stays or (module is root and state._auto_reshard_after_forward):
            kept += size
        else:
            transient = max(transient, (1 + (ahead if module in decoder else 1)) * size)
        sizes[module in decoder].append(count)
    return UnshardedWeights(kept, transient), sizes
