"""Bytes of one GPU: lasting states exactly, gathered weights as FSDP2 gathers, activations from measured constants."""

from collections import defaultdict
from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP

from titan_tts.plan import measured
from titan_tts.plan.parameters import HEAD, ROOT, Model
from torchtitan.models.dit_tts.config.batch_split import data_parallel_degree
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.compile import blocks_compiled, compiled_stacks
from torchtitan.models.dit_tts.infra.parallelize import blocks_by_checkpointing, reshards
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, learned_encoders
from torchtitan.models.dit_tts.run.factors import layout_name

_FLOAT32 = 4
_8BIT_BLOCK = 256
"""numbers of an 8-bit moment that share a scale"""


@dataclass(frozen=True)
class Layout:
    """Data-parallel ranks, replicas times shards, each of them `tensor` GPUs that share its samples."""

    replicas: int
    shards: int
    tensor: int = 1

    @classmethod
    def of(cls, config: JobConfig, gpus: int) -> "Layout":
        """The layout of a config. Raises InputError where its degrees do not make `gpus`."""
        ranks, parallelism = data_parallel_degree(config, gpus), config.parallelism
        replicas = parallelism.data_parallel_replicate_degree
        return cls(replicas, ranks // replicas, parallelism.tensor_parallel_degree)

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards

    @property
    def gpus(self) -> int:
        return self.ranks * self.tensor

    @property
    def sharded(self) -> bool:
        return self.shards > 1

    @property
    def name(self) -> str:
        kind = {"single": "", "ddp": "DDP", "fsdp": "FSDP2", "hsdp": "HSDP"}
        data = kind[layout_name(self.replicas, self.shards)]
        tensor = f"TP {self.tensor}" if self.tensor > 1 else ""
        return " x ".join(filter(None, (tensor, data))) or "one GPU"


def itemsize(dtype: str) -> int:
    return TORCH_DTYPE_MAP[dtype].itemsize


def local_parameters(model: Model, layout: Layout, *, trained: bool = False) -> int:
    """Numbers on the first rank of all weights, or of the trained ones."""
    return sum(
        each.local_numel(layout.shards, layout.tensor)
        for each in model.weights
        if each.trained or not trained
    )


def _optimizer_bytes(config: JobConfig, model: Model, layout: Layout) -> int:
    """Two moments of each trained parameter and a float32 step count; Muon has one moment of block matrices."""
    options, own, total = config.optimizer, itemsize(config.training.dtype), 0
    for weight in (each for each in model.weights if each.trained):
        numbers = weight.local_numel(layout.shards, layout.tensor)
        if options.name == "Muon" and weight.product:
            total += own * numbers
            continue
        total += _FLOAT32
        if options.state_dtype == "8bit" and numbers >= 4096 and numbers % _8BIT_BLOCK == 0:
            # torchao: a byte per number, a float32 scale per block, and each moment's table of 256 values.
            total += 2 * (numbers + _FLOAT32 * (numbers // _8BIT_BLOCK + 256))
        else:
            total += 2 * own * numbers
    return total


def lasting_bytes(config: JobConfig, model: Model, layout: Layout) -> dict[str, int]:
    """Weights, gradients, optimizer and EMA of the rank that holds the most."""
    own, trained = itemsize(config.training.dtype), local_parameters(model, layout, trained=True)
    found = {
        "weights": own * local_parameters(model, layout),
        "gradients": own * trained,
        "optimizer": _optimizer_bytes(config, model, layout),
    }
    if config.ema.enable and config.ema.decays:
        found["EMA"] = _FLOAT32 * trained * len(config.ema.decays)
    return found


def unit_sizes(config: JobConfig, model: Model, layout: Layout) -> dict[str, int]:
    """Numbers of the complete weights that FSDP2 gathers together, by unit."""
    found = defaultdict[str, int](int)
    for weight in model.weights:
        found[weight.unit] += weight.local_numel(1, layout.tensor)
    return found


def kept_units(config: JobConfig, units: dict[str, int]) -> set[str]:
    """Units whose weights stay gathered: the backward pass needs the last ones again at once."""
    if not reshards(config.parallelism):
        return set(units)
    blocks = [each for each in units if each.startswith("layers.")]
    return {ROOT, HEAD, *sorted(blocks, key=lambda each: int(each[7:]))[-1:]} & set(units)


def passing_bytes(
    config: JobConfig, model: Model, layout: Layout, micro_batches: int = 1
) -> dict[str, int]:
    """Complete weights and gradients in addition to the shards, or copies of the weights in the compute dtype; and a frozen
    text encoder, which every GPU has. `micro_batches`: of a step, over which complete gradients stay where complete
    weights do."""
    training, own = config.training, itemsize(config.training.dtype)
    compute, found = itemsize(training.mixed_precision_param), {}
    if layout.sharded:
        units = unit_sizes(config, model, layout)
        kept = kept_units(config, units)
        # One computes, and the next is fetched.
        passing = [2 * units[name] for name in units.keys() - kept]
        gathered = sum(units[name] for name in kept) + max(passing, default=0)
        reduced = itemsize(training.mixed_precision_reduce)
        found["gathered weights"] = compute * gathered
        found["gradients in flight"] = max(units.values()) * (compute + reduced)
        if micro_batches > 1 and not reshards(config.parallelism):
            whole = local_parameters(model, Layout(1, 1, layout.tensor), trained=True)
            found["complete gradients"] = reduced * whole
    else:
        numbers = local_parameters(model, layout)
        if layout.replicas > 1:
            found["second copy of weights"] = own * numbers
        if compute != own:
            found["weights in the compute dtype"] = compute * numbers
    if model.encoder_parameters:
        size = itemsize(config.encoder.dtype)
        found["frozen text encoder"] = model.encoder_parameters * size
    return found


def matmul_bytes(args: DiTTTSModelArgs, frames: int, tensor: int, sequence: bool) -> float:
    """Bytes in bfloat16 that the forward matmuls of a decoder block read and write for one sample on one GPU: q, k, v,
    gate, attended; gate, up and active, which tensor parallelism divides; and the inputs and outputs of attention
    and MLP, which sequence parallelism divides."""
    divided, others = 5 * args.dim + 3 * args.mlp_dim, 4 * args.dim
    return 2 * frames * (divided / tensor + others / (tensor if sequence else 1))


def activation_bytes(
    config: JobConfig, args: DiTTTSModelArgs, tensor: int, samples: int, lengths: Lengths
) -> dict[str, int]:
    """A micro-batch, and what its forward pass keeps for the backward pass."""
    wide = itemsize(config.training.mixed_precision_param) / 2
    sequence, compiled = config.megatron.sequence_parallel, blocks_compiled(config)
    unit = matmul_bytes(args, lengths.frames, tensor, sequence)
    stream = 2 * lengths.frames * args.dim / (tensor if sequence else 1) / unit
    saved = {"none": measured.SAVED_PLAIN[compiled], **measured.SAVED}
    if config.kernels.modulated_norm == "triton":
        saved = {kind: each + measured.SAVED_BY_TRITON * stream for kind, each in saved.items()}
    saved["full"] = stream
    blocks = blocks_by_checkpointing(config, args.n_layers)
    kept = sum(count * saved[kind] for kind, count in blocks.items())
    if "full" in blocks:  # one block at a time is computed again
        kept += saved["none"]
    encoders = measured.SAVED_PLAIN["encoders" in compiled_stacks(config)] * sum(
        n * 2 * length * (9 * width + 3 * mlp)
        for n, length, width, mlp in learned_encoders(args, lengths)
    )
    plain = 1 - blocks.get("full", 0) / max(1, args.n_layers)
    # Latents, noise and target; reference; features of the text.
    batch = (3 * lengths.frames + lengths.speaker_frames) * args.latent_channels
    batch += lengths.text_tokens * args.text_dim
    return {
        "micro-batch": samples * _FLOAT32 * batch,
        "saved activations": round(samples * wide * (kept * unit + plain * encoders)),
    }
