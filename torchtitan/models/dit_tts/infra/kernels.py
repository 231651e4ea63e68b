"""Other implementations of the model's operations, put in their place from outside. To add one: a subclass of
`Operations` with the operations that it has, and the case in which `implementation` returns it; tests compare
each with the definition."""

from collections.abc import Callable

import torch
from torch import nn

from torchtitan.models.dit_tts.infra.cpu_kernels import CPUKernels
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model.operations import Operations, WithOperations, upcast


class InductorKernels(Operations):
    """Definitions in the form from which Inductor makes the faster kernels on a GPU."""

    @staticmethod
    def silu_mul(both: torch.Tensor) -> torch.Tensor:
        # The gradients of unbind are concatenated, by a kernel that computes both for each number and drops one.
        # Those of selects are added, and share what they read and compute. The sigmoid takes fewer instructions
        # than SiLU.
        gate, up = upcast(both.select(-2, 0)), both.select(-2, 1)
        return (gate * torch.sigmoid(gate)).to(up.dtype) * up


def implementation(x: torch.Tensor) -> type[Operations]:
    """The operations for a tensor like x, here and now."""
    if torch.compiler.is_compiling():
        return Operations if x.is_cpu else InductorKernels
    # Not a subclass: fake tensors on the CPU are a plan for a GPU.
    return CPUKernels if type(x) is torch.Tensor and x.is_cpu else Operations


def use_operations(
    model: nn.Module, choose: Callable[[torch.Tensor], type[Operations]] = implementation
) -> None:
    """Lets the model's modules compute by what `choose` returns for a tensor."""
    for module in model.modules():
        if isinstance(module, WithOperations):
            module.operations = choose  # type: ignore[assignment, method-assign]


def build_model(args: DiTTTSModelArgs) -> DiTTTSModel | DurationModel:
    """The network of these sizes, whose modules compute by `implementation`."""
    model = DurationModel(args) if args.task == "duration" else DiTTTSModel(args)
    use_operations(model)
    return model
