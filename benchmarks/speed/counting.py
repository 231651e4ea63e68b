"""Gates that count: FLOPs against PyTorch's counter, graphs of torch.compile, bytes of collectives."""

from collections import Counter
from contextlib import ExitStack
from math import prod

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.cases import FULL_LENGTH, Outcome, debug_model, random_batch, randomize
from titan_tts.plan.states import DataParallelLayout, fake_process_group
from torchtitan.models.dit_tts import get_train_spec, model_flavors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.compile import apply_compile
from torchtitan.models.dit_tts.model.flops import Lengths, training_flops
from torchtitan.models.dit_tts.model.model import DiTTTSModel

LENGTHS = [
    FULL_LENGTH,
    Lengths(frames=101, text_tokens=37, speaker_frames=50),
]

SHAPES = [  # (samples, lengths): as a run's buckets, shorter ones with more samples
    (2, Lengths(64, 40, 64)),
    (3, Lengths(48, 32, 64)),
    (4, Lengths(32, 24, 32)),
    (6, Lengths(24, 16, 32)),
]

RANKS = 64
SHARDS_OF_HSDP = 8
# Gathered in bfloat16 for the forward and again for the backward pass, the first and last unit once;
# reduced in float32. What units round up to the number of ranks comes on top of the latter.
MOST_GATHERED = 4.0
MOST_REDUCED = 4.0 * 1.01


def flops() -> Outcome:
    """The formula of the training FLOPs and PyTorch's counter on the meta device, to the unit."""
    flavors = {name: args for name, args in model_flavors().items() if args.task == "speech"}
    cases = [(name, args, lengths) for name, args in flavors.items() for lengths in LENGTHS]
    cases += [("debug, learned text encoder", debug_model(), lengths) for lengths in LENGTHS]
    found = []
    for name, args, lengths in cases:
        with torch.device("meta"):
            model = DiTTTSModel(args)
        batch = {key: value.to("meta") for key, value in random_batch(args, 2, lengths).items()}
        with FlopCounterMode(display=False) as counter:
            model(**batch).sum().backward()
        found.append(
            {
                "model": name,
                "lengths": [lengths.frames, lengths.text_tokens, lengths.speaker_frames],
                "counted": counter.get_total_flops(),
                "formula": 2 * training_flops(args, lengths),
            }
        )
    equal = sum(row["counted"] == row["formula"] for row in found)
    return Outcome(
        equal == len(found),
        "equal to the unit in every case",
        f"{equal} of {len(found)} cases ({', '.join(flavors)}; learned text encoder)",
        {"cases": found},
    )


def graphs() -> Outcome:
    """Graphs that a model's blocks are compiled to over mixed lengths, twice through."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = DiTTTSModel(debug_model())
    randomize(model.parameters())
    counter = CompileCounterWithBackend("aot_eager")
    apply_compile(model, counter, len(SHAPES))
    after_shape = []
    for round_number in range(2):
        for samples, lengths in SHAPES:
            batch = random_batch(model.args, samples, lengths, seed=round_number)
            model(**batch).square().mean().backward()
            after_shape.append(counter.frame_count)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    first, second = after_shape[: len(SHAPES)], after_shape[len(SHAPES) :]
    return Outcome(
        first == list(range(1, len(SHAPES) + 1)) and set(second) == {len(SHAPES)} and not breaks,
        "one graph per shape for all blocks, no break, none in the second round",
        f"{first[-1]} graphs for {len(SHAPES)} shapes and {model.args.n_layers} blocks, "
        f"{second[-1] - first[-1]} in the second round, {breaks} breaks",
        {"graphs_after_each_batch": after_shape, "breaks": breaks},
    )


class CollectiveBytes(TorchDispatchMode):
    """Bytes of the whole tensors that collectives gather, scatter or reduce, by operation."""

    # Where the whole tensor stands among the arguments.
    WHOLE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0}

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name not in self.WHOLE:
                raise NotImplementedError(f"collective {name} is not counted")
            whole = args[self.WHOLE[name]]
            tensors = whole if isinstance(whole, (list, tuple)) else [whole]
            self.calls[name] += 1
            self.bytes[name] += sum(prod(t.shape) * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def _collectives(layout: DataParallelLayout) -> dict[str, float]:
    """Bytes a parameter and a step of the 800M flavor on the first of a layout's ranks."""
    config = load_config(
        [
            f"--parallelism.data_parallel_replicate_degree={layout.replicas}",
            f"--parallelism.data_parallel_shard_degree={layout.shards}",
            "--training.mixed_precision_param=bfloat16",
            "--activation_checkpoint.mode=none",
        ]
    )
    args = model_flavors()["800M"]
    with ExitStack() as modes:
        dims = modes.enter_context(fake_process_group(layout))
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with torch.device("cpu"):
            model = DiTTTSModel(args)
        parameters = sum(p.numel() for p in model.parameters())
        model = get_train_spec().parallelize_fn(model, dims, config)
        batch = random_batch(args, 1, Lengths(16, 8, 16))
        with CollectiveBytes() as counted:
            model(**batch).sum().backward()
    return {name: size / parameters for name, size in counted.bytes.items()} | {
        f"{name} calls": calls for name, calls in counted.calls.items()
    }


def collectives() -> Outcome:
    """Bytes a parameter at 64 ranks, counted at the collectives themselves."""
    fsdp = _collectives(DataParallelLayout(1, RANKS))
    hsdp = _collectives(DataParallelLayout(RANKS // SHARDS_OF_HSDP, SHARDS_OF_HSDP))
    most_replicated = 4.0 / SHARDS_OF_HSDP * 1.01
    within = all(
        found["_allgather_base_"] <= MOST_GATHERED
        and found["_reduce_scatter_base_"] <= MOST_REDUCED
        for found in (fsdp, hsdp)
    )
    replicated = hsdp.get("allreduce_", 0.0)
    return Outcome(
        within and 0 < replicated <= most_replicated and "allreduce_" not in fsdp,
        f"all-gather <= {MOST_GATHERED:.2f}, reduce-scatter <= {MOST_REDUCED:.2f}, all-reduce of HSDP "
        f"(8 shards) <= {most_replicated:.3f} bytes per parameter",
        f"FSDP2: {fsdp['_allgather_base_']:.2f} + {fsdp['_reduce_scatter_base_']:.2f}; HSDP 8x8: "
        f"{hsdp['_allgather_base_']:.2f} + {hsdp['_reduce_scatter_base_']:.2f} + {replicated:.3f}",
        {"ranks": RANKS, "FSDP2": fsdp, "HSDP 8x8": hsdp},
    )
