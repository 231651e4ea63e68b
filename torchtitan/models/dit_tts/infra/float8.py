"""fp8 training of the decoder's large products, by torchao: [model] converters = ["float8"].

Weights stay what they are, in the model and in its checkpoints; each product casts its operands to
fp8 with a scale of their own, in the forward and the backward pass (Micikevicius et al. 2022).

Upstream's converter is not used: it converts every Linear whose name is not given, emulates only one
of the recipes, and its module needs triton.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import FLOAT8_CONVERTER, JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.matmul_weights import matmul_weights
from torchtitan.protocols.model_converter import ModelConverter, register_model_converter
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_MULTIPLE = 16
"""Sizes of matrices that fp8's tensor cores take"""


class Float8Converter(ModelConverter):
    """Upstream's hook: replaces the blocks' large Linears by torchao's Float8Linear.

    Raises:
        InputError: a GPU without fp8, or a width that is no multiple of 16.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        options = job_config.quantize.linear.float8
        if not options.emulate and not has_cuda_capability(8, 9):
            raise InputError(
                "[model] converters = ['float8'] needs a GPU with fp8 (Ada, Hopper or later); take it "
                "out, or set [quantize.linear.float8] emulate = true to try the numerics, slowly"
            )
        self.options = options

    def convert(self, model: nn.Module) -> None:
        from torchao.float8 import convert_to_float8_training

        skipped = self.options.filter_fqns
        large = matmul_weights(model)
        products = {
            name: module
            for name, module in model.named_modules()
            if module in large and not any(part in name for part in skipped)
        }
        for name, linear in products.items():
            if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
                raise InputError(
                    f"[model] converters = ['float8']: layer {name} has the shape "
                    f"{tuple(linear.weight.shape)}, and fp8 needs multiples of {_MULTIPLE}; skip it by "
                    f"[quantize.linear.float8] filter_fqns"
                )
        wanted = set(products.values())
        convert_to_float8_training(
            model,
            module_filter_fn=lambda module, name: module in wanted,
            config=self._recipe(),
        )
        recipe = self.options.recipe_name or "tensorwise"
        logger.info(
            f"fp8, recipe {recipe}{', emulated' if self.options.emulate else ''}: {len(products)} "
            f"products of the blocks"
        )

    def _recipe(self) -> "Float8LinearConfig":
        from torchao.float8 import Float8LinearConfig

        if self.options.recipe_name == "rowwise":
            # Inductor otherwise keeps in float32 what eager rounds to bfloat16, and the scale of a
            # row is then not that of the values it scales (pytorch issue 150859).
            torch._inductor.config.emulate_precision_casts = True
        return replace(
            Float8LinearConfig.from_recipe_name(self.options.recipe_name or "tensorwise"),
            emulate=self.options.emulate,
            # Samples times frames or tokens are an inner dimension in the backward pass, and need
            # not be a multiple of 16; where they are, nothing is padded.
            pad_inner_dim=True,
        )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Scales are made anew in each product: nothing to do after a step."""


register_model_converter(Float8Converter, FLOAT8_CONVERTER)
