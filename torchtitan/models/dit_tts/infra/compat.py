"""Private names of torch that the product imports; a release may move or drop any of them."""

# Read in torch 2.13 (and the same in 2.11)
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

__all__ = [
    "dynamo_config",
    "dynamo_counters",
    "functorch_config",
    "get_default_store",
    "inductor_config",
    "list_mode_options",
    "replicate",
]
