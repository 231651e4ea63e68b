"""Seconds of an optimizer step: FLOPs and bytes over measured rates, and communication that nothing hides."""

from dataclasses import dataclass
from typing import Any, Literal

from titan_tts.plan import measured
from titan_tts.plan.devices import Cluster, Device, runs_fp8
from titan_tts.plan.memory import (
    Layout,
    itemsize,
    kept_units,
    local_parameters,
    matmul_bytes,
    unit_sizes,
)
from titan_tts.plan.parameters import Model
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.infra.parallelize import blocks_by_checkpointing, reshards
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    divisible_flops,
    repeated_flops,
    speaker_keys,
    teacher_flops,
    text_encoder_flops,
    training_flops,
)


@dataclass(frozen=True)
class Batches:
    """Steps of `accumulation` micro-batches of samples on each rank, all padded to the same lengths."""

    lengths: Lengths
    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Transfer:
    """One kind of communication in an optimizer step: bytes through one rank, and seconds if nothing else runs."""

    name: str
    volume: float
    seconds: float
    when: Literal["each", "first", "last", "between"]
    """in which micro-batches; between: two products, where nothing hides it"""


def model_flops(model: Model, lengths: Lengths) -> int:
    """FLOPs of one sample in a training step, as in a run's MFU: with text encoder and teacher, nothing repeated."""
    encoder = model.args.text_encoder_sizes
    text = text_encoder_flops(encoder, 1, lengths.text_tokens) if encoder else 0
    return training_flops(model.args, lengths) + teacher_flops(model.args, lengths) + text


def micro_batch_seconds(
    config: JobConfig, model: Model, device: Device, tensor: int, samples: int, lengths: Lengths
) -> dict[str, float]:
    """Seconds of the parts of one micro-batch on one GPU."""
    args, sequence = model.args, config.megatron.sequence_parallel
    blocks, compiled = blocks_by_checkpointing(config, args.n_layers), blocks_compiled(config)
    alone = 1 - 1 / tensor
    flops: float = model_flops(model, lengths) + repeated_flops(args, lengths, blocks, tensor)
    flops -= alone * 3 * divisible_flops(args, lengths)
    flops -= alone * args.teacher_passes * divisible_flops(args, lengths)
    keys = lengths.frames + lengths.text_tokens + speaker_keys(args, lengths)
    attention = 12 * args.n_layers * lengths.frames * keys * args.dim / tensor
    rate = measured.FLOP_FRACTION * device.peak_flops
    if runs_fp8(config):
        flops = attention + (flops - attention) / measured.FP8_GAIN
    unit = matmul_bytes(args, lengths.frames, tensor, sequence)
    passes = sum(count * (1 + measured.REPEATED[kind]) for kind, count in blocks.items())
    passes += args.n_layers * args.teacher_passes / 3
    moved = measured.POINTWISE[compiled] * passes * unit
    host = measured.HOST_SECONDS
    host += measured.TEXT_ENCODER_SECONDS if args.text_encoder_sizes is not None else 0.0
    return {
        "matmuls and attention": samples * flops / rate,
        "pointwise kernels": samples * moved / device.bandwidth,
        "waits for the host": host,
    }


def optimizer_seconds(config: JobConfig, model: Model, device: Device, layout: Layout) -> float:
    """Seconds of norm, clipping, update and averages of the rank's own parameters."""
    own = itemsize(config.training.dtype)
    # The norm reads gradients, clipping reads and writes; weights and two moments are read and written.
    moment = 1 if config.optimizer.state_dtype == "8bit" else own
    each = 3 * own + 3 * own + 4 * moment
    each += (own + 2 * 4) * len(config.ema.decays) if config.ema.enable else 0
    numbers = local_parameters(model, layout, trained=True)
    return each * numbers / (measured.OPTIMIZER_BANDWIDTH * device.bandwidth)


def communication(
    config: JobConfig, model: Model, layout: Layout, cluster: Cluster, batches: Batches
) -> tuple[list[Transfer], float]:
    """(the transfers of one rank in a step, fraction of the sharded ones that no computation hides). A ring over n
    ranks moves (n - 1)/n of its bytes through each, an all-reduce twice that; the groups of a node share its link
    to the others. Neighbouring ranks share samples, then shard."""
    training, args, times = config.training, model.args, batches.accumulation
    compute = itemsize(training.mixed_precision_param)
    reduced = itemsize(training.mixed_precision_reduce)
    found: list[Transfer] = []

    def add(name: str, size: float, ranks: int, stride: int, when: Any = "each") -> None:
        """`stride`: distance of neighbours in the ring."""
        moved = size * (ranks - 1) / ranks
        if not moved:
            return
        in_node = max(1, min(ranks, cluster.gpus_per_node // stride))
        links = moved / cluster.device.link if in_node > 1 else 0.0
        shared = cluster.gpus_per_node / in_node * moved / cluster.inter_node
        seconds = max(links, shared if ranks > in_node else 0.0) / measured.LINK_FRACTION
        found.append(Transfer(name, moved, seconds, when))

    units = unit_sizes(config, model, layout)
    weights = sum(units.values())
    kept = sum(units[each] for each in kept_units(config, units))
    trained = sum(each.local_numel(1, layout.tensor) for each in model.weights if each.trained)
    shards, tensor = layout.shards, layout.tensor
    first, last = ("each", "each") if times == 1 else ("first", "last")
    if layout.sharded:
        stay = not reshards(config.parallelism)
        once = (1, first) if stay else (times, "each")
        add("all-gather, forward", once[0] * compute * weights, shards, tensor, once[1])
        add("all-gather, backward", times * compute * (weights - kept), shards, tensor)
        passes = args.teacher_passes
        add("all-gather, teacher", times * passes * compute * (weights - kept), shards, tensor)
        add("reduce-scatter", once[0] * reduced * trained, shards, tensor, last if stay else "each")
    size = 2 * reduced * trained / shards
    add("all-reduce", size, layout.replicas, tensor * shards, last)
    blocks = blocks_by_checkpointing(config, args.n_layers)
    again = sum(blocks.get(kind, 0) for kind in ("full", "selective"))
    frames = 2 * times * compute * batches.micro_batch * batches.lengths.frames * args.dim
    # Under sequence parallelism a sum is a gather and a reduce-scatter, which move as much. Its backward pass gathers
    # gradients, too.
    sums = 2 * again + args.n_layers * (2 + 2 * args.teacher_passes)
    sums += args.n_layers * config.megatron.sequence_parallel
    add("tensor parallelism", sums * frames, tensor, 1, "between")
    add("beside products of tensor parallelism", 2 * args.n_layers * frames, tensor, 1)
    return found, max(units.values()) / weights


def exposed_seconds(
    transfers: list[Transfer], first: float, computing: float, micro_batches: int
) -> float:
    """Seconds of a step that computation does not hide: sums of tensor parallelism, which the next kernel needs;
    `first`, the fraction that is moved before anything computes; and what takes longer than the `computing` of the
    micro-batch in which it is moved, a step's over `micro_batches`."""
    seconds = dict.fromkeys(("each", "first", "last", "between"), 0.0)
    for transfer in transfers:
        seconds[transfer.when] += transfer.seconds
    waited = seconds.pop("between")
    found = waited + first * sum(seconds.values())
    each, *once = ((1 - first) * moved for moved in seconds.values())
    spare = max(0.0, computing - each) / micro_batches
    return found + max(0.0, each - computing) + sum(max(0.0, moved - spare) for moved in once)
