"""Steps of a config on a number of GPUs, predicted: their memory, time and communication."""

from dataclasses import dataclass, replace

from titan_tts.plan.devices import Cluster, Device, find_device, runs_fp8
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
    step_time,
    tensor_sums,
    with_error,
)
from torchtitan.models.dit_tts.config.batch_split import accumulation_steps, data_parallel_degree
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
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
