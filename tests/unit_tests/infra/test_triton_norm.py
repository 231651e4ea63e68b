"""The Triton kernel of gated update, norm, scale and shift in triton's interpreter, against the definition in float64."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.helpers.small_models import one_rank, padded_inputs, random_model, small_args
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.kernels import use_operations
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.infra.triton_norm import _backward, gated_norm, implementation
from torchtitan.models.dit_tts.model.operations import Operations

EPS = 1e-5
OWN = implementation(torch.empty(0)).gated_norm
# Lengths of one frame, of two chunks and a frame, of one and a frame, of less than one.
SHAPES = [(1, 1, 320), (2, 65, 5), (3, 33, 96), (2, 7, 1280)]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """The interpreter cuts float32 off to bfloat16, which a GPU rounds."""
    convert = interpreter._convert_float

    def rounded(values: np.ndarray, given: tl.dtype, wanted: tl.dtype, mode: object) -> np.ndarray:
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(values, given, wanted, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def inputs(shape: tuple[int, int, int], *dtypes: torch.dtype, gated: bool = True) -> list:
    """x, update, gate, scale, shift and two gradients, in memory as a block has them: gate, scale and shift are parts of
    one tensor."""
    samples, _, width = shape
    generator = torch.Generator().manual_seed(width)
    x, update, through, gradient = (3 * torch.randn(shape, generator=generator) for _ in range(4))
    gate, scale, shift = (
        torch.randn(3, 2, samples, width, generator=generator)
        .permute(2, 0, 1, 3)[..., None, :]
        .unbind(1)
    )
    given = x, update, gate[:, 0], scale[:, 0], shift[:, 1], through, gradient
    found = [each.to(dtype) for each, dtype in zip(given, dtypes or [torch.float32] * 7)]
    return found if gated else [found[0], None, None, *found[3:]]


def computed(norm: Callable, given: list) -> list[torch.Tensor]:
    """The stream, its norm, and the gradients of x, update, gate, scale and shift."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in given[:-2]]
    out = norm(*leaves, EPS)
    gradients = [each.to(of.dtype) for each, of in zip(given[-2:], out, strict=True)]
    found = torch.autograd.grad(out, [each for each in leaves if each is not None], gradients)
    return [*(each.detach() for each in out), *found]


def by_definition(given: list) -> list[torch.Tensor]:
    exact = [None if each is None else each.double() for each in given]
    return computed(Operations.gated_norm, exact)


@pytest.mark.long
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_the_definition_within_1e_5(shape, gated):
    given = inputs(shape, gated=gated)
    strided = [each if each is None else each.mT.contiguous().mT for each in given[:2]]
    strided += [*given[2:5], *(each[:1, :1].expand(shape) for each in given[5:])]
    for each in (given, strided):
        for found, expected in zip(computed(OWN, each), by_definition(each), strict=True):
            assert found.dtype == torch.float32 and found.shape == expected.shape
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_no_farther_from_it_than_the_plain_one(shape, gated):
    given = inputs(shape, *[torch.bfloat16] * 7, gated=gated)
    plain = computed(Operations.gated_norm, given)
    for own, other, expected in zip(computed(OWN, given), plain, by_definition(given), strict=True):
        assert own.dtype == other.dtype == torch.bfloat16
        assert (own - expected).norm() <= (other - expected).norm()


def test_dtypes_promote_as_in_the_definition():
    given = inputs((2, 33, 5), *[torch.bfloat16] * 2, *[torch.float32] * 5)
    for each in (given, inputs((2, 33, 5), *[torch.bfloat16] * 3, *[torch.float32] * 4)):
        dtypes = [found.dtype for found in computed(Operations.gated_norm, each)]
        assert [found.dtype for found in computed(OWN, each)] == dtypes
    with pytest.raises(ValueError, match="float64"):
        OWN(*(each.double() for each in given[:5]), EPS)


@pytest.mark.long
def test_bits_are_the_same_again_and_beside_other_samples():
    given = inputs((3, 33, 96))
    first = computed(OWN, given)
    assert all(map(torch.equal, first, computed(OWN, given)))
    alone = computed(OWN, [each[1:2] for each in given])
    assert all(map(torch.equal, (each[1:2] for each in first), alone))


@pytest.mark.long
def test_a_compiler_is_told_the_truth_about_both_operations():
    """Schema, shapes and dtypes of fake tensors, and all of it under AOTAutograd."""
    for gated in (True, False):
        x, update, gate, scale, shift, through, gradient = inputs((2, 3, 5), gated=gated)
        torch.library.opcheck(gated_norm, (x, update, gate, scale, shift, EPS))
        torch.library.opcheck(_backward, (through, gradient, x, update, gate, scale, EPS))


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out = model(**batch)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    found = torch.autograd.grad((out * weight).sum(), list(model.parameters()), allow_unused=True)
    return [out.detach(), *(each for each in found if each is not None)]


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["--activation_checkpoint.mode=none"],
        [
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
        ["--compile.enable", "--compile.backend=aot_eager", "--activation_checkpoint.mode=none"],
    ],
)
def test_a_model_of_the_key_computes_the_same(arguments):
    args = small_args(text_vocab_size=10)
    plain, model = random_model(args), random_model(args)
    batch = padded_inputs(args, [11, 8, 3], [4, 6, 1], [5, 2, 8])
    torch._dynamo.reset()
    config = load_config(["--kernels.modulated_norm=triton", *arguments])
    parallelize_dit_tts(model, one_rank(), config)
    gradients(model, batch)  # a compiler traces the operations
    with torch.profiler.profile() as profile:
        found = gradients(model, batch)
    calls = [event.name for event in profile.events()]
    assert calls.count("dit_tts::gated_norm_backward") == 2 * args.n_layers
    for own, expected in zip(found, gradients(plain, batch), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_a_sampler_share_one_time():
    x, update, gate, scale, shift, *gradients = inputs((3, 7, 96))
    block = random_model(small_args(text_vocab_size=10)).layers[0]
    use_operations(block, implementation)
    given = [x, update, gate[:1], scale[:1], shift[:1], *gradients]
    for found, expected in zip(
        computed(block.operations(x).gated_norm, given), by_definition(given), strict=True
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


COMPILED = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchtitan.models.dit_tts.infra import triton_norm as norm

found = []
for width in (1280, 4096):
    options = norm._launch_options(width)
    for gated, kernel, half in (
        (True, norm.triton_gated_norm, "x update gate scale shift moved out"),
        (False, norm.triton_gated_norm, "x update gate scale shift moved out"),
        (True, norm.triton_gated_norm_backward, "through gradient moved update gate scale d_moved d_update"),
        (False, norm.triton_gated_norm_backward, "through gradient moved update gate scale d_moved d_update"),
    ):
        constants = {"BLOCK": options["BLOCK"], "CHUNK": 32, "GATED": gated}
        constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        kinds = dict.fromkeys(half.split(), "*bf16") | {"sums": "*fp32", "eps": "fp32"}
        kinds |= dict.fromkeys(constants, "constexpr")
        signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": options["num_warps"]}
        )
        found.append(compiled.asm["ptx"])
print(json.dumps(found))
"""


@pytest.mark.long
def test_an_h100_compiles_them_without_atomics_and_rounds_to_nearest(tmp_path):
    """Without a device: triton brings the assembler for one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)
    assert len(programs) == 8
    for program in programs:
        assert "cvt.rn.bf16" in program and "cvt.rz" not in program
        assert re.findall(r"\b(?:atom|red)\.", program) == []
