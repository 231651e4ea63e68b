"""Seconds of an optimizer step: a roofline times one factor per GPU, and exposed communication.

    seconds = factor * (FLOPs / peak + bytes / bandwidth + kernels * launch time) + exposed communication

FLOPs are exact, bytes and kernels are counted for the 800M's block and scaled by the widths, and volumes of
collectives are counted. The factor is a guess; one relative error
stands for all that this leaves out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP

from titan_tts.plan.devices import Cluster, Device
from titan_tts.plan.states import DataParallelLayout, StateMemory
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.parallelize import reshards
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, speaker_keys

FORWARD, BACKWARD, TEXT_ENCODER = "forward", "backward", "text encoder"
"""Phases of a step whose computation can hide communication."""

NOTHING = "nothing"
"""hides those sums of tensor parallelism that the next kernel needs"""

GRADIENT_PRODUCTS = "products of gradients"
"""hide the others: the sum of a gradient before attention or MLP runs beside the weight's, and under sequence
parallelism a gather beside the product before it"""

# The last part of the backward pass has nothing after it to hide behind.
_HIDING_FRACTION = {FORWARD: 1.0, BACKWARD: 0.9, TEXT_ENCODER: 1.0, GRADIENT_PRODUCTS: 0.9}
_BACKWARD_FRACTION = 2 / 3

LINK_EFFICIENCY = 0.75
"""fraction of the links' bandwidth that collectives reach while the GPU computes; a guess"""

RING_STEP_SECONDS = 3e-6
"""of each step of a ring in addition to its bytes, inside and between nodes; a guess"""

LAUNCH_SECONDS = 2e-6
"""between the end of a kernel and the start of the next; a guess"""

FP8_GAIN = 1.4
"""rate of all FLOPs with the blocks' matmuls in fp8, over that in bf16; a guess"""

# Pointwise kernels of a block, forward and backward, by whether it is compiled: bytes over those that its
# forward matmuls read and write, and their number. 174 and 676 MiB a sample of the 800M's block over
# 32.3, and 46 and 150 kernels, as `benchmarks/speed_gates.py` counts them.
_TRAFFIC = {True: 5.4, False: 20.9}
_KERNELS = {True: 46, False: 150}
# Fraction of a block's pointwise bytes and kernels that checkpointing repeats (same source).
_MOVED_AGAIN = {"none": 0.0, "memory_budget": 0.06, "selective": 1 / 6, "full": 1 / 3}

_MOMENT_BYTES = {"float32": None, "bfloat16": 2, "8bit": 1}


@dataclass(frozen=True)
class Factor:
    """A GPU's computing time over the roofline's."""

    value: float
    error: float
    """relative, to either side"""

    origin: str


# A product at 0.7 of the peak, attention at 0.42, and 1.4 times the bytes at 0.8 of the bandwidth.
GUESS = Factor(1.6, 0.25, "a guess, not measured on this GPU")


@dataclass(frozen=True)
class Interval:
    """A prediction with its error to either side."""

    low: float
    estimate: float
    high: float


def with_error(seconds: float, factor: Factor) -> Interval:
    return Interval(seconds / (1 + factor.error), seconds, seconds * (1 + factor.error))


def scaled(seconds: Interval, amount: float) -> Interval:
    return Interval(seconds.low * amount, seconds.estimate * amount, seconds.high * amount)


def rate(amount: float, seconds: Interval) -> Interval:
    return Interval(amount / seconds.high, amount / seconds.estimate, amount / seconds.low)


# Communication

TensorSum = tuple[str, str, int, float, int]
"""(name, phase that can hide it, number in a micro-batch, bytes of each, rounds) of what tensor parallelism
communicates; an all-reduce has 2 rounds, a gather or reduce-scatter 1"""


@dataclass(frozen=True)
class Collective:
    """One kind of communication in an optimizer step: bytes through one rank, seconds and steps of rings, all per step."""

    name: str
    volume: float
    link_seconds: float
    """on the links inside nodes at full bandwidth"""

    network_seconds: float
    """on the links between nodes at full bandwidth"""

    ring_steps: int
    beside: str
    """the phase that can hide it"""

    micro_batches: int
    """of a step in which it runs: all or one"""

    end: float
    """fraction of it, first or last, that no computation can hide"""

    @property
    def seconds(self) -> float:
        """Per step with nothing else on the links; both kinds of links are busy at once."""
        busy = max(self.link_seconds, self.network_seconds) / LINK_EFFICIENCY
        return busy + self.ring_steps * RING_STEP_SECONDS


def busy_seconds(collectives: Iterable[Collective], phase: str) -> float:
    """Seconds that the collectives of a phase take in a micro-batch, without their ends: on the busier kind of
    links, or of the longest one.

    They share the links and otherwise run side by side, as FSDP2's streams do.
    """
    found = [(e, (1 - e.end) / e.micro_batches) for e in collectives if e.beside == phase]
    return max(
        sum(part * each.link_seconds for each, part in found) / LINK_EFFICIENCY,
        sum(part * each.network_seconds for each, part in found) / LINK_EFFICIENCY,
        max((part * each.seconds for each, part in found), default=0.0),
    )


def exposed_seconds(
    collectives: Sequence[Collective], computing: Mapping[str, float], accumulation: int
) -> float:
    """Seconds of a step that computation does not hide. What runs once a step has one micro-batch
    to hide behind. `computing`: phase -> seconds of its computation in a step.
    """
    exposed = sum(each.seconds * each.end for each in collectives)
    always = [each for each in collectives if each.micro_batches == accumulation]
    for phase, seconds in computing.items():
        hiding = _HIDING_FRACTION[phase] * seconds / accumulation
        for times, found in ((accumulation - 1, always), (1, collectives)):
            exposed += times * max(0.0, busy_seconds(found, phase) - hiding)
    return exposed


def communication(
    config: JobConfig,
    parameters: int,
    states: StateMemory,
    layout: DataParallelLayout,
    cluster: Cluster,
    accumulation: int,
    sums: Iterable[TensorSum] = (),
    passes: int = 0,
) -> tuple[Collective, ...]:
    """Communication of one optimizer step, as flat rings.

    Of W bytes among S ranks an all-gather or a reduce-scatter moves W (S - 1) / S through each rank in
    S - 1 steps, an all-reduce twice that. Inside a node they pass the GPU's own link; between nodes all
    groups of a node share the node's.

    Args:
        parameters: of the model, of which a rank has a part under tensor parallelism.
        layout: neighbouring ranks share samples, and these groups shard, as in upstream's mesh.
        sums: of tensor parallelism, as of `tensor_sums`.
        passes: through a teacher.
    """
    training = config.training
    compute = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize * parameters
    reduced_itemsize = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize
    reduced = states.trained_fraction * reduced_itemsize * parameters
    shards, groups_in_node = layout.shards, max(1, cluster.gpus_per_node // layout.tensor)
    in_node = min(shards, groups_in_node)
    found = []

    def add(
        name: str,
        beside: str,
        size: float,
        ranks: int,
        in_node: int,
        end: float,
        micro_batches: int = accumulation,
        units: int = states.units,
        rounds: int = 1,
    ) -> None:
        moved = micro_batches * rounds * size * (ranks - 1) / ranks
        groups = max(1, cluster.gpus_per_node // in_node)
        found.append(
            Collective(
                name=name,
                volume=moved,
                link_seconds=moved / cluster.device.link if in_node > 1 else 0.0,
                network_seconds=groups * moved / cluster.inter_node if ranks > in_node else 0.0,
                ring_steps=micro_batches * rounds * units * (ranks - 1),
                beside=beside,
                micro_batches=micro_batches,
                end=end,
            )
        )

    if states.encoder_units:
        # A frozen encoder has no backward pass and keeps nothing gathered between micro-batches.
        encoder, units = shards * states.encoder, states.encoder_units
        name = "all-gather, text encoder"
        add(name, TEXT_ENCODER, encoder, shards, in_node, end=1 / units, units=units)
    if layout.sharded:
        again = max(0.0, compute - states.gathered.kept)
        units = round(states.units * again / compute)
        once = accumulation if reshards(config.parallelism) else 1
        add("all-gather, forward", FORWARD, compute, shards, in_node, states.first, once)
        # It begins with blocks that have stayed gathered.
        add("all-gather, backward", BACKWARD, again, shards, in_node, end=0.0, units=units)
        if passes:  # of a teacher, whose encoders are gathered once, which is neglected
            size, end = passes * again, states.first / passes
            add("all-gather, teacher", FORWARD, size, shards, in_node, end, units=passes * units)
        add("reduce-scatter", BACKWARD, reduced, shards, in_node, states.first)
    if layout.replicas > 1:
        in_node = min(max(1, groups_in_node // shards), layout.replicas)
        size = reduced / shards
        add("all-reduce", BACKWARD, size, layout.replicas, in_node, states.first, 1, rounds=2)
    tensor = layout.tensor
    for name, beside, number, size, rounds in sums:
        in_node = min(tensor, cluster.gpus_per_node)
        # What nothing hides has an end each.
        end, times, units = (1.0, number, 1) if beside == NOTHING else (1 / number, 1, number)
        times *= accumulation
        add(name, beside, size * units, tensor, in_node, end, times, units, rounds)
    return tuple(found)


def tensor_sums(
    config: JobConfig,
    args: DiTTTSModelArgs,
    samples: int,
    lengths: Lengths,
    layout: DataParallelLayout,
    blocks: Mapping[str, int],
) -> list[TensorSum]:
    """A block's activations behind attention and MLP, and again where they are computed again, their gradients
    before both, and once those of text and speaker. Sequence parallelism gathers before both and divides
    behind both, gathers the inputs again in the backward pass, and sums the gradients of the modulation; and
    frames are gathered where blocks end or begin."""
    if layout.tensor == 1:
        return []
    number = TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize * samples
    frames = float(number * lengths.frames * args.dim)
    conditions = lengths.text_tokens * args.text_key_dim
    conditions += speaker_keys(args, lengths) * args.speaker_dim
    repeated = sum(blocks.get(kind, 0) for kind in ("full", "selective"))
    size = float(number * conditions)
    of_conditions = ("all-reduce, TP conditions", NOTHING, 1, size, 2)
    # Under sequence parallelism a gather and a reduce-scatter, which move as much.
    passes = 2 * args.n_layers * args.teacher_passes
    teacher = [("all-reduce, TP teacher", NOTHING, passes, frames, 2)] if passes else []
    forward, backward = 2 * (args.n_layers + repeated), 2 * args.n_layers
    if not config.megatron.sequence_parallel:
        return [
            ("all-reduce, TP forward", NOTHING, forward, frames, 2),
            ("all-reduce, TP backward", GRADIENT_PRODUCTS, backward, frames, 2),
            of_conditions,
            *teacher,
        ]
    modulation = float(number * 6 * args.dim)
    return [
        ("all-gather, SP forward", NOTHING, forward + 1, frames, 1),
        ("reduce-scatter, SP forward", NOTHING, forward, frames, 1),
        ("all-gather, SP backward", NOTHING, backward + 1, frames, 1),
        ("both, SP backward", GRADIENT_PRODUCTS, 2 * backward, frames, 1),
        ("all-reduce, SP modulation", NOTHING, args.n_layers, modulation, 2),
        of_conditions,
        *teacher,
    ]


def gradient_product_flops(
    config: JobConfig, args: DiTTTSModelArgs, frames: int, tensor: int
) -> float:
    """Of the `GRADIENT_PRODUCTS` of one sample on one of `tensor` GPUs."""
    products = 1 + config.megatron.sequence_parallel
    rows = 4 * args.dim + 2 * args.mlp_dim  # q, k, v, gate; gate and up
    return products * args.n_layers * 2 * frames * args.dim * rows / tensor


# Computation


def step_time(
    device: Device,
    factor: Factor,
    *,
    fp8: bool,
    accumulation: int,
    flops: float,
    encoder_flops: float,
    hiding_flops: float = 0.0,
    pointwise_bytes: float,
    kernels: float,
    copied_bytes: float,
    optimizer_bytes: float,
    communication: Sequence[Collective],
    teacher_share: float = 0.0,
) -> dict[str, float]:
    """Seconds of each part of a step on one GPU; work is per micro-batch, the optimizer's and communication per step.

    Args:
        flops: of the model, with recomputation.
        hiding_flops: of `GRADIENT_PRODUCTS`, which are among `flops`.
        copied_bytes: of weights and gradients that FSDP2 or `replicate` copies and casts.
        teacher_share: FLOPs of a frozen teacher over `flops`; its kernels are like the model's.
    """
    gain = FP8_GAIN if fp8 else 1.0
    per_micro_batch = {
        "matmuls and attention": flops / (gain * device.peak_flops),
        "pointwise kernels": pointwise_bytes / device.bandwidth,
        "kernel launches": kernels * LAUNCH_SECONDS,
        "text encoder": encoder_flops / device.peak_flops,
        "copies of weights": copied_bytes / device.bandwidth,
    }
    times = factor.value * accumulation
    parts = {name: times * seconds for name, seconds in per_micro_batch.items()}
    model, encoder = sum(list(parts.values())[:3]), parts["text encoder"]
    backward = _BACKWARD_FRACTION * model
    computing = {FORWARD: model - backward, BACKWARD: backward, TEXT_ENCODER: encoder}
    if teacher_share:
        parts["teacher"] = teacher_share * model
        computing[FORWARD] += parts["teacher"]
    computing[GRADIENT_PRODUCTS] = times * hiding_flops / (gain * device.peak_flops)
    parts["optimizer"] = factor.value * optimizer_bytes / device.bandwidth
    parts["exposed communication"] = exposed_seconds(communication, computing, accumulation)
    return parts


def pointwise_work(
    args: DiTTTSModelArgs,
    frames: int,
    blocks: Mapping[str, int],
    compiled: bool,
    tensor: int = 1,
    sequence: bool = False,
) -> tuple[float, float]:
    """(bytes of the decoder's pointwise kernels for one sample, number of its kernels)."""
    # Inputs and outputs of the forward matmuls in bfloat16: q, k, v, gate, attended; gate, up and active, of
    # which each of `tensor` GPUs has a part; and the two inputs and outputs of attention and MLP, of which
    # it has one under sequence parallelism.
    divided, others = 5 * args.dim + 3 * args.mlp_dim, 4 * args.dim
    matmul_bytes = 2 * frames * (divided / tensor + others / (tensor if sequence else 1))
    passes = sum(count * (1 + _MOVED_AGAIN[kind]) for kind, count in blocks.items())
    return passes * _TRAFFIC[compiled] * matmul_bytes, passes * _KERNELS[compiled]


def optimizer_bytes(config: JobConfig, states: StateMemory) -> float:
    """Bytes read and written between the backward pass and the next forward pass."""
    own = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    parameters = states.gradients / own
    moment = _MOMENT_BYTES[config.optimizer.state_dtype] or own
    clipping = 3 * own  # the norm, then each gradient scaled
    update = 3 * own + 2 * 2 * moment  # weight read and written, gradient read, two moments both
    ema = (own + 2 * 4) * len(config.ema.decays) if config.ema.enable else 0
    return parameters * (clipping + update + ema)


def copied_bytes(
    config: JobConfig, parameters: int, layout: DataParallelLayout, accumulation: int
) -> float:
    """Bytes read and written in addition to the collectives, per micro-batch."""
    training = config.training
    own = TORCH_DTYPE_MAP[training.dtype].itemsize
    if layout.sharded:
        compute = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
        reduced = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize
        cast = (own + compute) / layout.shards
        gathered = 2 * compute  # out of the collective's buffer, read and written
        times = 2 if reshards(config.parallelism) else 1 / accumulation
        return parameters * (times * (cast + gathered) + compute + reduced)
    if layout.replicas > 1:
        # Into the copy that `replicate` computes on, and gradients out of it.
        return parameters * 2 * own * (1 / accumulation + 1)
    return 0.0
