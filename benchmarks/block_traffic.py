"""Kernels and bytes of a compiled decoder block, forward and backward, of the noising and of a frozen text encoder, and what
the host launches in a step, without a device.

    python -m benchmarks.block_traffic

Inductor generates its Triton code for the block, at the size that is trained, as if the CPU were a GPU; nothing is
compiled or run. The generated kernels are counted, and the bytes that each must read and write at least, by Inductor's
own count. Attention is the CPU's. These are no measurements: how fast the kernels are is not in them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from functorch.compile import make_boxed_func
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.backends.compiler import GPUTarget

from tools.gpu_check.kernels import SHAPE, block_inputs
from tools.gpu_check.supervisor import ROOT
from torchtitan.models.dit_tts import main as training
from torchtitan.models.dit_tts import trainer
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.flow.objective import build_objective
from torchtitan.models.dit_tts.infra import kernels, triton_norm
from torchtitan.models.dit_tts.infra.compile import apply_compile, compile_frozen, compile_function
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder


@contextmanager
def counted() -> Iterator[list[Counter[str]]]:
    """The `traffic` of each graph for which Inductor generates code meanwhile; calling one returns memory of the right
    shapes, and computes nothing."""
    found: list[Counter[str]] = []

    def instead(graph: GraphLowering) -> Any:
        graph.codegen()
        found.append(traffic(graph))

        def call(inputs: list[Any]) -> tuple[Any, ...]:
            inputs.clear()
            return tuple(map(_memory, graph.graph_outputs))

        return SimpleNamespace(call=call, __file__=__file__)

    device = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    with (
        inductor_config.patch(force_disable_caches=True, cpu_backend="triton"),
        mock.patch.object(triton.runtime.driver, "_active", device),
        mock.patch.object(ir, "is_cpu", lambda x: False),  # there a sigmoid is stored, not repeated
        mock.patch.object(GraphLowering, "compile_to_module", instead),
    ):
        yield found


def _memory(output: Any) -> torch.Tensor | None:
    if isinstance(output, ir.NoneAsConstantBuffer):
        return None
    sizes = [int(size) for size in output.get_size()]
    strides = [int(stride) for stride in output.get_stride()]
    return torch.empty_strided(sizes, strides, dtype=output.get_dtype())


def traffic(graph: GraphLowering) -> Counter[str]:
    """Kernels and bytes: `generated`, of `own` operations and of `library` ones (products, attention)."""
    found = Counter[str]()
    for node in graph.scheduler.nodes:
        size = node.get_read_write_buffers_sizes()
        if not size:
            continue
        name = str(getattr(node.node, "op_overload", "")) if node.is_extern() else ""
        kind = "own" if "dit_tts" in name else "library" if node.is_extern() else "generated"
        found[f"{kind} kernels"] += 1
        found[f"{kind} bytes"] += size
    return found


def block_traffic(
    args: DiTTTSModelArgs, shape: tuple[int, ...], own_norm: bool
) -> list[Counter[str]]:
    """Counts of kernels and bytes in the forward and in the backward pass of one block of this model."""
    with torch.device("meta"):
        model = DiTTTSModel(replace(args, attention="sdpa"))
    block = model.layers[0].to_empty(device="cpu")
    inputs = block_inputs(model, shape)
    torch._dynamo.reset()
    with (
        mock.patch.object(kernels, "implementation", lambda x: kernels.InductorKernels),
        functorch_config.patch(activation_memory_budget=0.9),
        counted() as found,
        torch.autocast("cpu", torch.bfloat16),
    ):
        choose = triton_norm.implementation if own_norm else kernels.implementation
        kernels.use_operations(block, choose)
        apply_compile(model, "inductor", 1)
        out = block(*inputs)
        out.backward(torch.empty_like(out))
    return found


class _Operators(TorchDispatchMode):
    """Counts operators that compute, as the host launches them one by one, outside of graphs by the backend `unseen`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def outside_traffic(
    config: JobConfig, samples: int, frames: int, tokens: int
) -> dict[str, tuple[int, Counter[str]]]:
    """Operators of the noising and of a frozen text encoder, and the `traffic` of both once they are compiled."""
    add_noise = build_objective(config).add_noise
    latents = torch.zeros(samples, frames, config.data.latent_channels)
    place = torch.tensor(0), torch.arange(samples), torch.tensor(samples)
    encoder = PretrainedTextEncoder(find_source(config.encoder.model, download=False)).bfloat16()
    texts = torch.ones(samples, tokens, dtype=torch.int64), torch.ones(samples, tokens).bool()
    counts = {}
    parts: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        "noising": (add_noise, (latents, *place)),
        "text encoder": (encoder, texts),
    }
    torch._dynamo.reset()
    with torch.no_grad():
        for name, (function, given) in parts.items():
            with _Operators() as operators:
                # The first sample alone: as many operators.
                function(*(each[:1] if each.dim() else each for each in given))
            if function is encoder:
                compile_frozen(encoder, config)
            else:
                function = compile_function(function, "inductor", 1)
            with counted() as graphs:
                function(*given)
            counts[name] = operators.count, sum(graphs, Counter[str]())
    return counts


def _unseen(module: Any, inputs: Any) -> Any:
    def run(*given: Any) -> Any:
        with _disable_current_modes():
            return module(*given)

    return make_boxed_func(run)


@register_backend
def unseen(module: Any, inputs: Any) -> Any:
    """A backend of torch.compile whose graphs launch nothing that `_Operators` counts."""
    return aot_autograd(fw_compiler=_unseen, bw_compiler=_unseen)(module, inputs)


def step_operators(*keys: str) -> int:
    """Operators that the host launches in a training step of `debug`, of one micro-batch, without those in graphs of the
    backend `unseen`. `keys`: arguments of the config."""

    def count(step: Callable[[], None]) -> int:
        with _Operators() as operators:
            step()
        return operators.count

    return _of_steps(count, *keys)[-1]


def step_milliseconds(*keys: str) -> float:
    """CPU time of this process in such a step, the median of ten; its samples have 16 frames, so that launching is most of it."""

    def measure(step: Callable[[], None]) -> float:
        began = time.process_time()
        step()
        return 1e3 * (time.process_time() - began)

    sizes = ("max_frames", "max_speaker_frames", "max_text_tokens")
    return median(_of_steps(measure, *(f"--data.{size}=16" for size in sizes), *keys))


def _of_steps(measure: Callable[[Callable[[], None]], Any], *keys: str) -> list[Any]:
    """Values of `measure` for ten training steps, after two for warm-up."""
    found: list[Any] = []

    class Measured(trainer.DiTTTSTrainer):
        def train_step(self, data_iterator: Any) -> None:
            step = partial(super().train_step, data_iterator)
            if self.step <= 2:
                return step()
            found.append(measure(step))

    sizes = ("training.local_batch_size", "training.global_batch_size", "data.batch_multiple")
    with TemporaryDirectory() as runs, mock.patch.object(trainer, "DiTTTSTrainer", Measured):
        given = [f"--job.config_file={ROOT}/train_configs/debug.toml", f"--job.dump_folder={runs}"]
        given += ["--benchmark.enable", "--benchmark.steps=10", "--benchmark.warmup_steps=2"]
        given += ["--benchmark.lengths=longest", *(f"--{size}=2" for size in sizes)]
        torch._dynamo.reset()
        assert training.train([*given, *keys]) == 0
    return found


def _said(found: Counter[str]) -> str:
    kinds = ("generated", "own", "library")
    return "; ".join(
        f"{k} {found[f'{k} kernels']}, {found[f'{k} bytes'] / 1e9:.2f} GB" for k in kinds
    )


def main() -> None:
    args = model_flavors()["800M"]
    print(f"one block of 800M, {SHAPE}, bfloat16 autocast, memory budget 0.9; GB = 1e9 bytes")
    for said, own_norm in (("definition", False), ("own norm", True)):
        for way, found in zip(("forward", "backward"), block_traffic(args, SHAPE, own_norm)):
            print(f"{said}, {way}: {_said(found)}")
    keys = ["--job.config_file=train_configs/dit_tts_800m.toml", "--compile.enable"]
    config = load_config([*keys, "--compile.components", "text_encoder"])
    for name, (operators, found) in outside_traffic(config, *SHAPE[:3]).items():
        print(f"{name}: {operators} operators; compiled {_said(found)}")
    compiled = ["--compile.enable", "--compile.backend=unseen", "--compile.components", "model"]
    for said, keys in {
        "a step of debug": [],
        "outside its blocks": compiled,
        "outside what can be compiled": [*compiled, "encoders", "loss"],
    }.items():
        print(f"{said}: {step_operators(*keys)} operators")
    compiled = ["--compile.enable", "--compile.components", "model", "encoders", "loss"]
    for said, keys in {"eager": [], "compiled": compiled}.items():
        print(f"a step of debug with short samples, {said}: {step_milliseconds(*keys):.0f} ms")


if __name__ == "__main__":
    main()
