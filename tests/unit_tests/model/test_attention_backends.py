"""The backends of the decoder's attention: one result, whatever is padded or dropped."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from tests.helpers.small_models import full_inputs, small_args, until
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sums
from torchtitan.models.dit_tts.model import attention_backends
from torchtitan.models.dit_tts.model.attention_backends import (
    BACKENDS,
    MaskedKeys,
    VarlenKeys,
    attend,
    packed_attention,
    prepare_keys,
)
from torchtitan.models.dit_tts.model.model import DiTTTSModel


def poisoned_attention(q, k, v, q_starts, k_starts, q_max, k_max):
    """Flash attention does not read rows of no sample; its results and gradients there are whatever was in
    memory."""

    def poison(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        outside = torch.arange(len(x)) >= starts[-1]
        return torch.where(outside[:, None, None], torch.nan, x)

    starts = (q_starts, k_starts, k_starts)
    for tensor, own in zip((q, k, v), starts):
        tensor.register_hook(lambda gradient, own=own: poison(gradient, own))
    unread = [poison(x, own).nan_to_num(1e3) for x, own in zip((q, k, v), starts)]
    return poison(packed_attention(*unread, q_starts, k_starts, q_max, k_max), q_starts)


def streams(valid: torch.Tensor, lengths: tuple[int, int, int], dtype: torch.dtype):
    """q (B, T, 3, 8), and keys and values of the three streams, all asking for gradients."""
    generator = torch.Generator().manual_seed(5)

    def normal(length: int) -> torch.Tensor:
        x = torch.randn(len(valid), length, 3, 8, generator=generator, dtype=dtype)
        return x.requires_grad_()

    return normal(lengths[0]), [normal(n) for n in lengths], [normal(n) for n in lengths]


LENGTHS = (140, 9, 130)
VALID = torch.cat([until([140, 20], 140), until([0, 4], 9), until([130, 0], 130)], dim=1)


def test_rows_that_flash_attention_leaves_are_neither_read_nor_passed_on(monkeypatch):
    q, keys, values = streams(VALID, LENGTHS, torch.float64)
    tensors, valid = [q, *keys, *values], VALID[:, :140]
    # Nobody reads padded frames, so no gradient comes from them.
    seen = torch.where(valid[..., None, None], torch.randn(q.shape, dtype=q.dtype), 0.0)
    monkeypatch.setattr(attention_backends, "packed_attention", poisoned_attention)
    found = []
    for backend in ("varlen", "sdpa"):  # test_against_definition has every backend's numbers
        out = prepare_keys(backend, VALID, 140, q.dtype).attend(q, keys, values)
        assert out.isfinite().all()
        found.append([out[valid], *torch.autograd.grad((out * seen).sum(), tensors)])
    for poisoned, expected in zip(*found, strict=True):
        torch.testing.assert_close(poisoned, expected, rtol=0, atol=1e-12)


def test_the_kernel_of_flash_attention_is_called_as_it_wants(monkeypatch):
    """Through the operator's own shapes and gradient, on tensors without data."""
    monkeypatch.setattr(attention_backends, "packed_attention", varlen_attn)
    with FakeTensorMode():
        valid = torch.ones(2, 279, dtype=torch.bool)
        q, keys, values = streams(valid, LENGTHS, torch.bfloat16)
        out = prepare_keys("varlen", valid, 140, q.dtype).attend(q, keys, values)
        assert out.shape == q.shape
        out.sum().backward()
        for tensor in (q, *keys, *values):
            assert tensor.grad.shape == tensor.shape


@pytest.mark.parametrize("mask", ["causal", "boolean", "additive"])
def test_bfloat16_on_a_cpu_is_matmuls(mask, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 2, 8, generator=generator).bfloat16()
    valid = until([9, 4], 9)[:, None, None]
    additive = torch.zeros(valid.shape, dtype=q.dtype).masked_fill(~valid, -math.inf)
    chosen = {"boolean": valid, "additive": additive}.get(mask)
    expected = attend(
        *(x.float() for x in (q, k, v)), None if chosen is None else valid, mask == "causal"
    )
    monkeypatch.setattr(attention_backends, "_sdpa", None)
    found = attend(q, k, v, chosen, mask == "causal")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_value_is_read_from_the_device(backend):
    """The device "meta" has no values, and no shapes that depend on them."""
    args = small_args(attention=backend, condition_tokens=3, text_positions="aligned")
    with torch.device("meta"):
        model, inputs = DiTTTSModel(args), full_inputs(args, 3, 11, 7, 10)
        inputs["text_features"] = torch.zeros(3, 7, args.text_dim)
        number, rows = torch.zeros((), dtype=torch.long), torch.arange(3)
    noisy = FlowMatching().add_noise(inputs.pop("latents"), number, rows, rows.sum())
    inputs |= {"t": noisy.t, "keep_text": noisy.keep_text, "keep_speaker": noisy.keep_speaker}
    out = model(latents=noisy.latents, **inputs)
    squared_error_sums(out, noisy.target, inputs["frame_mask"]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_backend_fits_config_device_and_dtype():
    kinds = {"sdpa": MaskedKeys, "matmul": MaskedKeys, "varlen": VarlenKeys}
    for backend, kind in {**kinds, "auto": MaskedKeys}.items():
        keys = prepare_keys(backend, VALID, 140, torch.float32)
        assert type(keys) is kind
        assert kind is not MaskedKeys or keys.by_matmul == (backend == "matmul")
    with pytest.raises(ValueError, match="'dense' is not one of auto, sdpa, matmul, varlen"):
        prepare_keys("dense", VALID, 140, torch.float32)
    cuda, choose = torch.device("cuda"), attention_backends.choose_backend
    assert choose("auto", torch.device("cpu"), torch.bfloat16) == "matmul"
    assert choose("varlen", cuda, torch.bfloat16) == "varlen"
    assert choose("varlen", cuda, torch.float32) == "sdpa"  # flash attention has no float32
