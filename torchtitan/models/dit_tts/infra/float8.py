"""fp8 training of the decoder's large matmuls, by torchao: [model] converters = ["float8"].

Each matmul casts its operands to fp8 with scales of its own (Micikevicius et al. 2022); weights keep their dtype.
Upstream's converter converts every Linear that is not excluded by name, and needs triton.
"""

from dataclasses import replace

from torch import nn

from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import compat
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability


class Float8Converter(ModelConverter):
    """Upstream's hook: replaces the blocks' large Linears by torchao's Float8Linear."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        options = job_config.quantize.linear.float8
        if not options.emulate and not has_cuda_capability(8, 9):
            raise InputError(
                "[model] converters = ['float8'], but this GPU has no fp8 (Ada, Hopper and later have); "
                "remove it, or set [quantize.linear.float8] emulate = true to test the numerics, slowly"
            )
        self.options = options

    def convert(self, model: nn.Module) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        large, skipped = matmul_weights(model), self.options.filter_fqns
        linears = {
            name
            for name, module in model.named_modules()
            if module in large and not any(part in name for part in skipped)
        }
        recipe = self.options.recipe_name or "tensorwise"
        if recipe == "rowwise":
            # Otherwise Inductor keeps float32 values that eager mode rounds to bfloat16, and a row's scale
            # does not fit its values (pytorch issue 150859).
            compat.inductor_config.emulate_precision_casts = True
        # The backward pass's inner dimension, samples · frames, need not be a multiple of 16.
        made = Float8LinearConfig.from_recipe_name(recipe)
        made = replace(made, emulate=self.options.emulate, pad_inner_dim=True)
        convert_to_float8_training(
            model, module_filter_fn=lambda module, name: name in linears, config=made
        )
        emulated = ", emulated" if self.options.emulate else ""
        logger.info(f"fp8, recipe {recipe}{emulated}: {len(linears)} matmuls of the blocks")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Does nothing: each matmul computes its scales."""
