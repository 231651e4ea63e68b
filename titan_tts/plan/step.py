"""An optimizer step on a cluster: bytes of one GPU, and seconds.

Lasting states are exact, and weights are gathered as FSDP2 gathers them; activations and seconds follow from measured
constants, and communication is bytes over bandwidth.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torchtitan.config import TORCH_DTYPE_MAP

from titan_tts.plan import measured
from titan_tts.plan.devices import Cluster, runs_fp8
from titan_tts.plan.parameters import HEAD, ROOT, Model
from torchtitan.models.dit_tts.config.batch_split import data_parallel_degree
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.infra.compile import blocks_compiled, compiled_stacks
from torchtitan.models.dit_tts.infra.parallelize import blocks_by_checkpointing, reshards
from torchtitan.models.dit_tts.model import flops
from torchtitan.models.dit_tts.run.factors import layout_name

WAITS = "waits for the host"
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


@dataclass(frozen=True)
class Batches:
    """Steps of `accumulation` micro-batches of samples on each rank, all padded to the same lengths."""

    lengths: flops.Lengths
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


@dataclass(frozen=True)
class Step:
    """A step of a config. Bytes and seconds are those of the first rank, which holds the most."""

    config: JobConfig
    model: Model
    cluster: Cluster
    batches: Batches

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.cluster.gpus)

    @property
    def samples(self) -> int:
        """Number of samples of a step, on all ranks."""
        return self.layout.ranks * self.batches.micro_batch * self.batches.accumulation

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.cluster.device.capacity

    @property
    def seconds(self) -> float:
        return sum(self.time.values())

    @property
    def flops(self) -> int:
        """FLOPs of all ranks, with text encoder and teacher, nothing repeated."""
        return self.samples * self._sample_flops

    def mfu(self, seconds: float, flops: float = 0) -> float:
        """Exact FLOPs (empty: the step's) over the dense bf16 peak, also in fp8."""
        done = flops or self.flops
        return done / self.layout.gpus / self.cluster.device.peak_flops / seconds

    @cached_property
    def lasting(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer and EMA."""
        own, trained = self._itemsize("dtype"), self._numbers(trained=True)
        found = {"weights": own * self._numbers(), "gradients": own * trained}
        found["optimizer"] = self._optimizer_bytes()
        if self.config.ema.enable and self.config.ema.decays:
            found["EMA"] = _FLOAT32 * trained * len(self.config.ema.decays)
        return found

    @property
    def offloaded(self) -> int:
        """Bytes in the machine's memory for each GPU."""
        offloads = self.config.training.enable_cpu_offload and self.layout.sharded
        return sum(self.lasting.values()) if offloads else 0

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of one GPU by part, an upper bound, as not all are largest at once."""
        found = {} if self.offloaded else dict(self.lasting)
        found |= self.passing()
        if self.model.args.teacher_passes:
            found["teacher"] = found.get("weights", 0) + found.get("gathered weights", 0)
        return found | self.activations()

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds of the step by part."""
        times = self.batches.accumulation
        found = {name: times * each for name, each in self._micro_batch_seconds().items()}
        computing = sum(found.values()) - found[WAITS]
        found["optimizer"] = self._optimizer_seconds()
        exposed = exposed_seconds(self.transfers, self.first_fraction, computing, times)
        return found | {"exposed communication": exposed}

    @property
    def first_fraction(self) -> float:
        """Transfers that gather weights before anything computes."""
        return max(self._units.values()) / self._units.total()

    @cached_property
    def _units(self) -> Counter[str]:
        """Numbers of the complete weights that FSDP2 gathers together, by unit."""
        found = Counter[str]()
        for weight in self.model.weights:
            found[weight.unit] += weight.local_numel(1, self.layout.tensor)
        return found

    @cached_property
    def _kept(self) -> set[str]:
        """Units whose weights stay gathered: the backward pass needs the last ones again at once."""
        if not reshards(self.config.parallelism):
            return set(self._units)
        blocks = [each for each in self._units if each.startswith("layers.")]
        last = sorted(blocks, key=lambda each: int(each[7:]))[-1:]
        return {ROOT, HEAD, *last} & set(self._units)

    @cached_property
    def _blocks(self) -> dict[str, int]:
        """Kind of activation checkpointing -> decoder blocks."""
        return blocks_by_checkpointing(self.config, self.model.args.n_layers)

    @property
    def _sample_flops(self) -> int:
        args, lengths = self.model.args, self.batches.lengths
        encoder = args.text_encoder_sizes
        text = flops.text_encoder_flops(encoder, 1, lengths.text_tokens) if encoder else 0
        return flops.training_flops(args, lengths) + flops.teacher_flops(args, lengths) + text

    def _itemsize(self, key: str) -> int:
        """Bytes of a number in the dtype of a key of [training]."""
        return TORCH_DTYPE_MAP[getattr(self.config.training, key)].itemsize

    def _numbers(self, *, trained: bool = False, shards: int = 0) -> int:
        """Numbers on the first rank of all weights, or of the trained ones. `shards`: 0: the layout's."""
        return sum(
            each.local_numel(shards or self.layout.shards, self.layout.tensor)
            for each in self.model.weights
            if each.trained or not trained
        )

    def _optimizer_bytes(self) -> int:
        """Two moments of each trained parameter and a float32 step count; Muon has one moment of block matrices."""
        options, own, total = self.config.optimizer, self._itemsize("dtype"), 0
        for weight in (each for each in self.model.weights if each.trained):
            numbers = weight.local_numel(self.layout.shards, self.layout.tensor)
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

    def passing(self) -> dict[str, int]:
        """Bytes of complete weights and gradients in addition to the shards, or of copies of the weights in the compute
        dtype; and of a frozen text encoder, which every GPU has."""
        compute, own = self._itemsize("mixed_precision_param"), self._itemsize("dtype")
        found = {}
        if self.layout.sharded:
            # One computes, and the next is fetched.
            passing = [2 * size for name, size in self._units.items() if name not in self._kept]
            gathered = sum(self._units[name] for name in self._kept) + max(passing, default=0)
            reduced = self._itemsize("mixed_precision_reduce")
            found["gathered weights"] = compute * gathered
            found["gradients in flight"] = max(self._units.values()) * (compute + reduced)
            # Over the micro-batches of a step they stay where complete weights do.
            if self.batches.accumulation > 1 and not reshards(self.config.parallelism):
                found["complete gradients"] = reduced * self._numbers(trained=True, shards=1)
        else:
            if self.layout.replicas > 1:
                found["second copy of weights"] = own * self._numbers()
            if compute != own:
                found["weights in the compute dtype"] = compute * self._numbers()
        if self.model.encoder_parameters:
            size = TORCH_DTYPE_MAP[self.config.encoder.dtype].itemsize
            found["frozen text encoder"] = self.model.encoder_parameters * size
        return found

    def _block_bytes(self) -> tuple[float, float]:
        """Bytes in bfloat16 of a decoder block for one sample on one GPU: what its forward matmuls read and write, and its
        input. Tensor parallelism divides q, k, v, gate, attended; gate, up and active of the MLP; sequence parallelism
        also the inputs and outputs of attention and MLP."""
        args, tensor = self.model.args, self.layout.tensor
        of_frames = tensor if self.config.megatron.sequence_parallel else 1
        divided, others = (5 * args.dim + 3 * args.mlp_dim) / tensor, 4 * args.dim / of_frames
        frames = 2 * self.batches.lengths.frames
        return frames * (divided + others), frames * args.dim / of_frames

    def activations(self) -> dict[str, int]:
        """Bytes of a micro-batch, and of what its forward pass keeps for the backward pass."""
        config, args, lengths = self.config, self.model.args, self.batches.lengths
        products, stream = self._block_bytes()
        plain = measured.SAVED_PLAIN[blocks_compiled(config)]
        saved = {"none": plain * products}
        saved |= {kind: each * products for kind, each in measured.SAVED.items()}
        if config.kernels.modulated_norm == "triton":
            more = measured.SAVED_BY_TRITON * stream
            saved = {kind: each + more for kind, each in saved.items()}
        saved["full"] = stream
        kept = sum(count * saved[kind] for kind, count in self._blocks.items())
        if "full" in self._blocks:  # one block at a time is computed again
            kept += saved["none"]
        encoders = measured.SAVED_PLAIN["encoders" in compiled_stacks(config)] * sum(
            n * 2 * length * (9 * width + 3 * mlp)
            for n, length, width, mlp in flops.learned_encoders(args, lengths)
        )
        kept += encoders * (1 - self._blocks.get("full", 0) / max(1, args.n_layers))
        # Latents, noise and target; reference; features of the text.
        batch = (3 * lengths.frames + lengths.speaker_frames) * args.latent_channels
        batch += lengths.text_tokens * args.text_dim
        samples, wide = self.batches.micro_batch, self._itemsize("mixed_precision_param") / 2
        return {
            "micro-batch": samples * _FLOAT32 * batch,
            "saved activations": round(samples * wide * kept),
        }

    def _micro_batch_seconds(self) -> dict[str, float]:
        args, lengths, device = self.model.args, self.batches.lengths, self.cluster.device
        tensor, samples = self.layout.tensor, self.batches.micro_batch
        done: float = self._sample_flops + flops.repeated_flops(args, lengths, self._blocks, tensor)
        done -= (1 - 1 / tensor) * (3 + args.teacher_passes) * flops.divisible_flops(args, lengths)
        if runs_fp8(self.config):
            keys = lengths.frames + lengths.text_tokens + flops.speaker_keys(args, lengths)
            attention = 12 * args.n_layers * lengths.frames * keys * args.dim / tensor
            done = attention + (done - attention) / measured.FP8_GAIN
        passes = sum(count * (1 + measured.REPEATED[kind]) for kind, count in self._blocks.items())
        passes += args.n_layers * args.teacher_passes / 3
        moved = measured.POINTWISE[blocks_compiled(self.config)] * passes * self._block_bytes()[0]
        host = measured.HOST_SECONDS
        host += measured.TEXT_ENCODER_SECONDS if args.text_encoder_sizes is not None else 0.0
        return {
            "matmuls and attention": samples * done / measured.FLOP_FRACTION / device.peak_flops,
            "pointwise kernels": samples * moved / device.bandwidth,
            WAITS: host,
        }

    def _optimizer_seconds(self) -> float:
        """Norm, clipping, update and averages of the rank's own parameters."""
        own, ema = self._itemsize("dtype"), self.config.ema
        # The norm reads gradients, clipping reads and writes; weights and two moments are read and written.
        moment = 1 if self.config.optimizer.state_dtype == "8bit" else own
        each = 3 * own + 3 * own + 4 * moment
        each += (own + 2 * _FLOAT32) * len(ema.decays) if ema.enable else 0
        bandwidth = measured.OPTIMIZER_BANDWIDTH * self.cluster.device.bandwidth
        return each * self._numbers(trained=True) / bandwidth

    @cached_property
    def transfers(self) -> list[Transfer]:
        """The transfers of one rank in a step. A ring over n ranks moves (n - 1)/n of its bytes through each, an
        all-reduce twice that; the groups of a node share its link to the others. Neighbouring ranks share samples, then
        shard."""
        args, times, cluster = self.model.args, self.batches.accumulation, self.cluster
        compute = self._itemsize("mixed_precision_param")
        reduced = self._itemsize("mixed_precision_reduce")
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

        weights = self._units.total()
        passing = compute * (weights - sum(self._units[each] for each in self._kept))
        trained = reduced * self._numbers(trained=True, shards=1)
        shards, tensor = self.layout.shards, self.layout.tensor
        first, last = ("each", "each") if times == 1 else ("first", "last")
        if self.layout.sharded:
            stays = not reshards(self.config.parallelism)
            once, gathers, reduces = (1, first, last) if stays else (times, "each", "each")
            add("all-gather, forward", once * compute * weights, shards, tensor, gathers)
            add("all-gather, backward", times * passing, shards, tensor)
            add("all-gather, teacher", times * args.teacher_passes * passing, shards, tensor)
            add("reduce-scatter", once * trained, shards, tensor, reduces)
        add("all-reduce", 2 * trained / shards, self.layout.replicas, tensor * shards, last)
        again = sum(self._blocks.get(kind, 0) for kind in ("full", "selective"))
        frames = 2 * times * compute * self.batches.micro_batch * self.batches.lengths.frames
        frames *= args.dim
        # Under sequence parallelism a sum is a gather and a reduce-scatter, which move as much. Its backward pass gathers
        # gradients, too.
        sums = 2 * again + args.n_layers * (2 + 2 * args.teacher_passes)
        sums += args.n_layers * self.config.megatron.sequence_parallel
        add("tensor parallelism", sums * frames, tensor, 1, "between")
        add("beside products of tensor parallelism", 2 * args.n_layers * frames, tensor, 1)
        return found


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
