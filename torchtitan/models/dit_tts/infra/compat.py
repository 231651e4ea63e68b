"""Private names of other libraries that the product uses; a release may move or drop any of them.

Importable names are imported from here; `ATTRIBUTES` lists names that are reached through an object. The test
of this file lists the names that the installed versions lack.
"""

# Read in torch 2.13 (and the same in 2.11)
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._higher_order_ops import flex_attention as flex_attention_op
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

__all__ = [
    "dynamo_config",
    "dynamo_counters",
    "flex_attention_op",
    "functorch_config",
    "get_default_store",
    "inductor_config",
    "list_mode_options",
    "replicate",
]

ATTRIBUTES = {
    "torch 2.13": [
        "torch:_foreach_copy_",
        "torch:_foreach_lerp_",
        "torch._utils:_get_available_device_type",
        "torch.nn.attention.varlen:torch.ops.torch_attn._varlen_attn",
        "torch:ops.aten._scaled_mm",
        "torch:ops.aten._unsafe_view",
        "torch:ops.aten._scaled_dot_product_cudnn_attention",
        "torch:ops.aten._scaled_dot_product_efficient_attention",
        "torch:ops.aten._scaled_dot_product_flash_attention",
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    ],
    "torchtitan 0.2.2": [
        "torchtitan.components.checkpoint:CheckpointManager._find_load_step",
        "torchtitan.components.optimizer:OptimizersContainer._post_init",
        "torchtitan.config.manager:ConfigManager._dict_to_dataclass",
        "torchtitan.distributed.parallel_dims:device_type",
    ],
    "transformers 5.23": ["transformers:AutoModel._model_mapping"],
    "fsspec 2026.9": ["fsspec.asyn:AsyncFileSystem._cat_file"],
}
"""Private attributes, as `module:attribute`, by the version they were read in."""
