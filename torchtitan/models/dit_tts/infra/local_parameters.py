"""Parameters that are DTensors for FSDP2, optimizers, clipping and checkpoints, and plain tensors, this rank's
parts, for the modules' own code."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module itself, without its children's."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def compute_locally(module: nn.Module) -> None:
    """Lets the module's attributes be this rank's parts of its own parameters, by a class with a property for
    each. `parameters()` and state dicts have the DTensors."""
    if names := tuple(own_parameters(module)):
        module.__class__ = _local_class(type(module), names)  # type: ignore[arg-type]


@cache
def _local_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def of(name: str) -> property:
        def read(module: Any) -> torch.Tensor:
            parts = module.parts_in_compute
            return _part(module._parameters[name]) if parts is None else parts[name]

        return property(read)

    members: dict[str, Any] = {name: of(name) for name in names}
    # Messages and the compiler's logs have the class's own name.
    return type(kind.__name__, (kind,), {**members, "parts_in_compute": None})


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter. FSDP2 also asks for sharded ones, and gets them as they are."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("tp",):
        return parameter.to_local()
    return parameter


def hand_in_parts(block: nn.Module) -> None:
    """Takes the parts of a compiled block's parameters before the block runs, outside its graph. Inside, the
    mesh would be in the graph, which neither full checkpointing nor a memory budget can save. (In eager mode
    checkpointing by operation would miss these operations, which it sees only where a block runs again.) To be
    called last, since hooks that were registered before gather the parameters."""
    owners = [module for module in block.modules() if own_parameters(module)]

    @torch.compiler.disable  # what the compiled block's hooks call would be a graph of its own
    def take(_: nn.Module, args: Any) -> None:
        for owner in owners:
            found = own_parameters(owner).items()
            parts = {name: _part(value) for name, value in found}
            for part in parts.values():
                torch._dynamo.mark_static(part)  # as parameters are where a block takes any lengths
            owner.parts_in_compute = parts  # type: ignore[assignment]

    @torch.compiler.disable
    def leave(_: nn.Module, args: Any, output: Any) -> None:
        for owner in owners:
            owner.parts_in_compute = None  # type: ignore[assignment]

    block.register_forward_pre_hook(take)
    block.register_forward_hook(leave, always_call=True)
