"""Parameters, memory, time and MFU of a run, from its config and a number of GPUs; nothing is started.

`make_summary` needs no GPU to be named: `--dry-run` prints it. `make_plan` adds memory against a GPU's
capacity, communication and time on a named cluster, for every length bucket.
"""

import os
from dataclasses import dataclass, replace

import numpy as np

from titan_tts.plan.activations import ActivationMemory
from titan_tts.plan.devices import Cluster, Device, check_device, find_device, runs_fp8
from titan_tts.plan.memory import Activations, MemoryNeed, largest_micro_batch, memory_need
from titan_tts.plan.parameters import (
    Download,
    ModelSizes,
    Part,
    build_on_meta,
    count_parameters,
    downloads,
    model_sizes,
)
from titan_tts.plan.states import DataParallelLayout, StateMemory, state_memory
from titan_tts.plan.step_time import (
    Collective,
    Factor,
    Interval,
    communication,
    copied_bytes,
    gradient_product_flops,
    optimizer_bytes,
    pointwise_work,
    rate,
    scaled,
    step_time,
    tensor_sums,
    with_error,
)
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.batch_split import accumulation_steps, data_parallel_degree
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.data.batch_ramp import batch_ramp
from torchtitan.models.dit_tts.data.buckets import BatchPolicy
from torchtitan.models.dit_tts.data.build import (
    open_training_data,
    sample_draws,
    training_samples,
)
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, batch_policy
from torchtitan.models.dit_tts.data.storage import find_shards, sidecar_path
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote
from torchtitan.models.dit_tts.infra.adapters import add_adapter
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.infra.parallelize import blocks_by_checkpointing
from torchtitan.models.dit_tts.infra.parallelize_megatron import split_parameters
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    divided_training_flops,
    divisible_flops,
    repeated_flops,
    teacher_flops,
    text_encoder_flops,
    training_flops,
)
from torchtitan.models.dit_tts.run.benchmark.synthetic import synthetic_data


@dataclass(frozen=True)
class Batches:
    """Steps of `accumulation` micro-batches of samples on each rank, all padded to the same lengths."""

    lengths: Lengths
    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Summary:
    """Predictions that hold for any kind of GPU. Samples, FLOPs (without recomputation) and volumes are those of a step
    of the longest bucket, volumes through one rank, the others of all."""

    config: JobConfig
    layout: DataParallelLayout
    parts: list[Part]
    unknown: tuple[str, ...]
    """sentences about what depends on the data"""

    states: StateMemory
    downloads: list[Download]
    longest: Batches
    samples: int
    flops: int
    encoder_flops: int
    teacher_flops: int
    volumes: dict[str, float]
    """bytes, by collective"""

    data_hours_per_step: float | None = None
    """of audio without padding, by the indexes of [data] path; None: not there, or not read"""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A predicted optimizer step with micro-batches of one shape."""

    batches: Batches
    time: dict[str, float]
    """seconds of each part"""

    seconds: Interval
    flops: int
    """of all ranks, without recomputation"""

    mfu: Interval
    """over the dense bf16 peak, also in fp8"""

    samples_per_second: Interval
    communication: tuple[Collective, ...]


@dataclass(frozen=True, kw_only=True)
class Step(TimedStep):
    """With its memory."""

    memory: MemoryNeed
    fraction: float = 1.0
    """of a run's steps"""

    largest: int = 0
    """micro-batch of this shape that fits, in samples"""


@dataclass(frozen=True)
class Plan:
    """A config on a cluster, as `titan-tts plan` prints it. Means and the whole run are for lengths of [benchmark]."""

    summary: Summary
    cluster: Cluster
    factor: Factor
    longest: Step
    peak_bucket: Step
    """of all buckets, the one that needs the most memory"""

    largest: int
    """local_batch_size with which every bucket fits"""

    buckets: list[Step]
    mean_seconds: Interval
    mean_mfu: Interval
    global_batches: float
    """complete ones of all steps; fewer than steps where there is a batch ramp"""

    warmup_batches: float
    hours_per_step: float
    """of audio without padding, in the mean over complete steps"""

    gpu_hours: Interval
    """without validation, checkpoints and restarts"""

    cost: Interval | None


def layout_of(config: JobConfig, gpus: int) -> DataParallelLayout:
    ranks, parallelism = data_parallel_degree(config, gpus), config.parallelism
    replicas = parallelism.data_parallel_replicate_degree
    return DataParallelLayout(replicas, ranks // replicas, parallelism.tensor_parallel_degree)


def longest_batches(config: JobConfig, ranks: int) -> Batches:
    """Of samples as long as the limits of [data] allow."""
    data = config.data
    longest = data.bucket_frames[-1] if data.bucket_frames else data.max_frames
    return Batches(
        Lengths(longest, data.max_text_tokens, data.max_speaker_frames),
        config.training.local_batch_size,
        accumulation_steps(config, ranks),
    )


def _hours_per_step(policy: BatchPolicy, frames_per_second: float) -> float:
    """Of audio without padding, in the mean over the steps."""
    counts, sizes = np.array(policy.sample_counts), np.array(policy.batch_sizes)
    frames = policy.useful_fraction * (counts * [shape[0] for shape in policy.shapes]).sum()
    return float(frames / (counts / sizes).sum() / frames_per_second / 3600)


def estimated_buckets(config: JobConfig, ranks: int) -> list[tuple[float, Batches]]:
    """(fraction of the steps, batches) of each length bucket, shortest first; packed batches are one. Raises
    as `synthetic_data`."""
    return _buckets(synthetic_data(config, ranks)[1], ranks, accumulation_steps(config, ranks))


def _buckets(policy: BatchPolicy, ranks: int, accumulation: int) -> list[tuple[float, Batches]]:
    per_step = ranks * accumulation
    if isinstance(policy, PackedPolicy):
        # As samples of the mean length: their attention, a few hundredths of the FLOPs, is too small by a third.
        streams = np.array(policy.shapes[0]) * (policy.batch_sizes[0] // per_step)
        samples = max(1, round(streams[0] * policy.useful_fraction / policy.lengths[:, 0].mean()))
        return [(1.0, Batches(Lengths(*(-(-streams // samples)).tolist()), samples, accumulation))]
    steps = [n / size for n, size in zip(policy.sample_counts, policy.batch_sizes)]
    return [
        (number / sum(steps), Batches(Lengths(*shape), size // per_step, accumulation))
        for shape, size, number in zip(policy.shapes, policy.batch_sizes, steps, strict=True)
        if number
    ]


def _sample_flops(sizes: ModelSizes, lengths: Lengths) -> tuple[int, int]:
    """(training FLOPs of the model, FLOPs of a pretrained text encoder) for one sample."""
    encoder = sizes.args.text_encoder_sizes
    text = text_encoder_flops(encoder, 1, lengths.text_tokens) if encoder else 0
    return training_flops(sizes.args, lengths), text


class Planner:
    """Predicts steps of configs that differ only in layout, checkpointing, compilation and batch."""

    def __init__(self, config: JobConfig, gpus: int):
        """config: its model and limits hold for all."""
        self.ranks = data_parallel_degree(config, gpus)
        self.config = upstream_view(config, run_folder_path(config), self.ranks)
        self.gpus = gpus
        self.sizes = sizes = model_sizes(self.config)
        model = build_on_meta(self.sizes.args, config.training.dtype)
        add_adapter(model, config.lora)
        self.parts = count_parameters(model, config.encoder, sizes.source)
        self.parameters = sum(p.numel() for p in model.parameters())
        if sizes.args.teacher_passes:
            self.parts.append(Part("teacher", self.parameters, False, "frozen"))
        self.divisible = sum(p.numel() for p in split_parameters(model))
        self.longest = longest_batches(self.config, self.ranks)
        self.activations = Activations(
            self.sizes.args, self.longest.lengths, self.longest.micro_batch
        )
        self._states: dict[tuple[DataParallelLayout, bool, str], StateMemory] = {}

    def states(self, config: JobConfig) -> StateMemory:
        layout = layout_of(config, self.gpus)
        training = config.training
        units = f"{config.parallelism} {training.mixed_precision_reduce}"
        key = layout, training.enable_cpu_offload, units
        if key not in self._states:
            self._states[key] = state_memory(config, self.sizes.args, self.sizes.source, layout)
        return self._states[key]

    def memory(self, config: JobConfig, device: Device, batches: Batches) -> MemoryNeed:
        sharded = layout_of(config, self.gpus).sharded
        activations = self.activations.memory(config, sharded, batches.micro_batch, batches.lengths)
        return memory_need(self.states(config).on_gpu, activations, device)

    def largest(self, config: JobConfig, device: Device, batches: Batches) -> int:
        """The largest micro-batch of this shape that fits."""
        return largest_micro_batch(
            lambda samples: self.memory(config, device, replace(batches, micro_batch=samples)).fits
        )

    def _own_parameters(self, tensor: int) -> int:
        """Of one rank before data parallelism divides them."""
        return self.parameters - self.divisible + self.divisible // tensor

    def communication(
        self, config: JobConfig, cluster: Cluster, batches: Batches
    ) -> tuple[Collective, ...]:
        """Of one rank in a step."""
        args, layout = self.sizes.args, layout_of(config, self.gpus)
        blocks = blocks_by_checkpointing(config, args.n_layers)
        sums = tensor_sums(config, args, batches.micro_batch, batches.lengths, layout, blocks)
        own, states = self._own_parameters(layout.tensor), self.states(config)
        times = batches.accumulation
        where = layout, cluster, times
        return communication(config, own, states, *where, sums, args.teacher_passes)

    def timed(
        self, config: JobConfig, cluster: Cluster, factor: Factor, batches: Batches
    ) -> TimedStep:
        """Needs no pass over the model."""
        args, samples, lengths = self.sizes.args, batches.micro_batch, batches.lengths
        layout, states = layout_of(config, self.gpus), self.states(config)
        blocks, tensor = blocks_by_checkpointing(config, args.n_layers), layout.tensor
        kind = blocks_compiled(config), tensor, config.megatron.sequence_parallel
        pointwise, kernels = pointwise_work(args, lengths.frames, blocks, *kind)
        flops, encoder_flops = _sample_flops(self.sizes, lengths)
        executed = flops - divided_training_flops(args, lengths) * (1 - 1 / tensor)
        executed += repeated_flops(args, lengths, blocks, tensor)
        taught, passes = teacher_flops(args, lengths), args.teacher_passes
        of_rank = taught - passes * divisible_flops(args, lengths) * (1 - 1 / tensor)
        # Of a trained one's forward and backward passes; by operation about half of the matmuls are repeated.
        share = (blocks.get("full", 0) + blocks.get("selective", 0) / 2) / args.n_layers
        repeated_text = share * encoder_flops / 3 if args.text_encoder is not None else 0
        collectives, times = self.communication(config, cluster, batches), batches.accumulation
        own = self._own_parameters(tensor)
        time = step_time(
            cluster.device,
            factor,
            fp8=runs_fp8(config),
            accumulation=times,
            flops=samples * executed,
            encoder_flops=samples * (encoder_flops + repeated_text),
            hiding_flops=samples * gradient_product_flops(config, args, lengths.frames, tensor),
            pointwise_bytes=samples * pointwise,
            kernels=kernels,
            copied_bytes=copied_bytes(config, own, layout, times),
            optimizer_bytes=optimizer_bytes(config, states),
            communication=collectives,
            teacher_share=of_rank / executed,
        )
        seconds = with_error(sum(time.values()), factor)
        all_samples = self.ranks * times * samples
        all_flops = all_samples * (flops + encoder_flops + taught)
        return TimedStep(
            batches=batches,
            time=time,
            seconds=seconds,
            flops=all_flops,
            mfu=rate(all_flops / self.gpus / cluster.device.peak_flops, seconds),
            samples_per_second=rate(all_samples, seconds),
            communication=collectives,
        )

    def step(self, config: JobConfig, cluster: Cluster, factor: Factor, batches: Batches) -> Step:
        timed = self.timed(config, cluster, factor, batches)
        return Step(**vars(timed), memory=self.memory(config, cluster.device, batches))

    def summary(self) -> Summary:
        longest = self.longest
        samples = self.ranks * longest.micro_batch * longest.accumulation
        flops, encoder_flops = _sample_flops(self.sizes, longest.lengths)
        # Volumes depend on no GPU, times do.
        any_cluster = Cluster(find_device("H100"), gpus_per_node=self.gpus, nodes=1)
        collectives = self.communication(self.config, any_cluster, longest)
        return Summary(
            config=self.config,
            layout=layout_of(self.config, self.gpus),
            parts=self.parts,
            unknown=self.sizes.unknown,
            states=self.states(self.config),
            downloads=downloads(self.config, self.sizes.source),
            longest=longest,
            samples=samples,
            flops=samples * flops,
            encoder_flops=samples * encoder_flops,
            teacher_flops=samples * teacher_flops(self.sizes.args, longest.lengths),
            volumes={each.name: each.volume for each in collectives},
        )


def make_summary(config: JobConfig, gpus: int) -> tuple[Summary, ActivationMemory]:
    """(the summary, activations of an eager micro-batch of the longest bucket)."""
    validate_config(config, gpus, list(model_flavors()))
    planner = Planner(config, gpus)
    summary, longest = planner.summary(), planner.longest
    # Compiling blocks takes most of a plan's time.
    eager = replace(planner.config, compile=replace(planner.config.compile, enable=False))
    activations, _ = planner.activations.measured(
        eager, summary.layout.sharded, longest.micro_batch, longest.lengths
    )
    return replace(summary, data_hours_per_step=_data_hours_per_step(planner.config)), activations


def _data_hours_per_step(config: JobConfig) -> float | None:
    data = config.data
    paths = [data.path] if isinstance(data.path, str) else data.path
    try:
        shards = (
            [] if any(map(is_remote, paths)) else [each for p in paths for each in find_shards(p)]
        )
    except InputError:
        return None
    if not shards or not all(os.path.exists(sidecar_path(each)) for each in shards):
        return None
    dataset = open_training_data(data)
    # At least as many as with any encoder: no sample is left out for its text, which is not read.
    tokens = np.minimum(dataset.text_bytes + 2, data.max_text_tokens)
    selection = training_samples(data, dataset, tokens)
    lengths = dataset.reference_frames[selection.samples], tokens[selection.samples]
    draws = sample_draws(data, dataset, selection)
    size = config.training.global_batch_size
    policy = batch_policy(data, size, selection.frames, *lengths, draws)
    return _hours_per_step(policy, data.frames_per_second)


def make_plan(config: JobConfig, cluster: Cluster, factor: Factor, price: float = 0.0) -> Plan:
    """price: of one GPU for an hour; 0: not known."""
    check_device(config, cluster.device)
    planner = Planner(config, cluster.gpus)
    config, longest, device = planner.config, planner.longest, cluster.device
    step = planner.step(config, cluster, factor, longest)
    largest = planner.largest(config, device, longest)
    step = replace(step, largest=largest)
    buckets = []
    _, policy = synthetic_data(config, planner.ranks)
    for fraction, batches in _buckets(policy, planner.ranks, longest.accumulation):
        fits = planner.largest(config, device, batches)
        each = planner.step(config, cluster, factor, batches)
        buckets.append(replace(each, fraction=fraction, largest=fits))
        # Every bucket's micro-batch is in proportion to the longest's.
        largest = min(largest, fits * longest.micro_batch // batches.micro_batch)
    if config.data.batching == "packed":  # whole rows
        largest -= largest % config.data.longest_per_row
    seconds = sum(each.fraction * each.seconds.estimate for each in buckets)
    flops = sum(each.fraction * each.flops for each in buckets)
    mean = with_error(seconds, factor)
    ramp = batch_ramp(config.training)
    complete = ramp.global_batches(config.training.steps)
    gpu_hours = scaled(mean, complete * cluster.gpus / 3600)
    return Plan(
        summary=planner.summary(),
        cluster=cluster,
        factor=factor,
        longest=step,
        peak_bucket=max([step, *buckets], key=lambda each: each.memory.total),
        largest=largest,
        buckets=buckets,
        mean_seconds=mean,
        mean_mfu=rate(flops / cluster.gpus / device.peak_flops, mean),
        global_batches=complete,
        warmup_batches=ramp.global_batches(config.lr_scheduler.warmup_steps),
        hours_per_step=_hours_per_step(policy, config.data.frames_per_second),
        gpu_hours=gpu_hours,
        cost=scaled(gpu_hours, price) if price else None,
    )
