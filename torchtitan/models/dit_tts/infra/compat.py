"""Private names of torch that the product imports; a release may move or drop any of them. Those of the compiler are imported
when they are first used, as attributes of this module: most commands compile nothing, and it takes a second."""

from pkgutil import resolve_name
from typing import Any

# Read in torch 2.13 (and the same in 2.11)
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

__all__ = ["get_default_store", "replicate"]

_OF_THE_COMPILER = {
    "dynamo_config": "torch._dynamo.config",
    "dynamo_counters": "torch._dynamo.utils:counters",
    "functorch_config": "torch._functorch.config",
    "inductor_config": "torch._inductor.config",
    "list_mode_options": "torch._inductor:list_mode_options",
    "symbolic_shapes": "torch.fx.experimental._config",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_COMPILER:
        raise AttributeError(name)
    return resolve_name(_OF_THE_COMPILER[name])
