"""The backends of the decoder's attention: one result, whatever is padded or dropped."""

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.helpers.small_models import random_model, small_args, until
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sums
from torchtitan.models.dit_tts.model import attention_backends
from torchtitan.models.dit_tts.model.attention_backends import (
    BACKENDS,
    FlexKeys,
    MatmulKeys,
    SdpaKeys,
    VarlenKeys,
    attend,
    packed_attention,
    prepare_keys,
)
from torchtitan.models.dit_tts.model.model import DiTTTSModel

SMALL = small_args(
    n_heads=4,
    speaker_dim=16,
    speaker_mlp_dim=24,
    latent_channels=8,
    text_dim=16,
    adaln_rank=6,
    text_positions="scaled",
)

OTHERS = ("matmul", "varlen", "flex")


def build(attention: str = "sdpa") -> DiTTTSModel:
    return random_model(replace(SMALL, attention=attention))


def batch(
    frames: list[int], text: list[int], speaker: list[int], sizes=(11, 7, 10), **keep
) -> dict[str, torch.Tensor]:
    """Rows with these lengths, padded to `sizes`; large numbers stand in the padding."""
    generator = torch.Generator().manual_seed(1)
    T, L, S = sizes
    rows = len(frames)

    def normal(length: int, width: int, lengths: list[int]) -> torch.Tensor:
        values = torch.randn(rows, length, width, generator=generator)
        return torch.where(until(lengths, length)[..., None], values, 100.0 * values)

    return {
        "latents": normal(T, SMALL.latent_channels, frames),
        "t": torch.rand(rows, generator=generator),
        "frame_mask": until(frames, T),
        "text_ids": torch.zeros(rows, L, dtype=torch.long),
        "text_mask": until(text, L),
        "speaker": normal(S, SMALL.latent_channels, speaker),
        "speaker_mask": until(speaker, S),
        "text_positions": torch.rand(rows, L, generator=generator),
        "text_features": normal(L, SMALL.text_dim, text),
    } | {name: torch.tensor(value) for name, value in keep.items()}


BATCHES = {
    "nothing masked": batch([11, 11], [7, 7], [10, 10]),
    "padding": batch([11, 6, 1], [4, 7, 1], [10, 5, 3]),
    "text dropped": batch([11, 6], [4, 7], [10, 5], keep_text=[False, True]),
    "speaker dropped": batch([11, 6], [4, 7], [10, 5], keep_speaker=[True, False]),
    "both dropped": batch(
        [11, 6], [4, 7], [10, 5], keep_text=[False, False], keep_speaker=[False, True]
    ),
    "empty text": batch([9, 6], [0, 3], [10, 0]),
    "empty row": batch([9, 0], [3, 0], [8, 0]),
    "one row": batch([8], [4], [6]),
    "several blocks": batch([150, 40], [20, 9], [300, 0], (150, 20, 300), keep_text=[True, False]),
}


def outcome(model: DiTTTSModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output at valid frames, and the gradient of every parameter and of the latents."""
    model.zero_grad()
    latents = inputs["latents"].clone().requires_grad_()
    out = model(**{**inputs, "latents": latents})
    assert out.isfinite().all()
    valid = inputs["frame_mask"]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights)[valid].sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"output": out.detach()[valid], "latents": latents.grad[valid]} | gradients


def assert_equal_outcomes(actual: dict, expected: dict, relative: float = 1e-4) -> None:
    """Each tensor within `relative` of its own largest value; rounding leaves 1e-6."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0 or name.startswith("layers") or "text" in name or "speaker" in name
        difference = (actual[name].double() - value.double()).abs().max().item()
        assert difference <= relative * max(scale, 1.0), (name, difference, scale)


class ByFlexAttention(FlexKeys):
    """The kernel itself, as on a GPU."""

    def attend(self, q, keys, values):
        k, v = (torch.cat(streams, dim=1).transpose(1, 2) for streams in (keys, values))
        return flex_attention(q.transpose(1, 2), k, v, block_mask=self.blocks).transpose(1, 2)


@contextlib.contextmanager
def real_flex_attention(monkeypatch):
    """PyTorch has a backward pass of flex attention on the CPU but refuses to be asked for it."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention_backends, "FlexKeys", ByFlexAttention)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def poisoned_attention(q, k, v, q_starts, k_starts, q_max, k_max):
    """As flash attention may: rows of no sample are not read, and what comes out there and as their
    gradients is whatever was in memory."""

    def poison(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        outside = torch.arange(len(x)) >= starts[-1]
        return torch.where(outside[:, None, None], torch.nan, x)

    q.register_hook(lambda gradient: poison(gradient, q_starts))
    for tensor in (k, v):
        tensor.register_hook(lambda gradient: poison(gradient, k_starts))
    unread = [
        poison(x, s).nan_to_num(1e3) for x, s in ((q, q_starts), (k, k_starts), (v, k_starts))
    ]
    return poison(packed_attention(*unread, q_starts, k_starts, q_max, k_max), q_starts)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("case", BATCHES)
def test_backends_agree(backend, case):
    inputs = BATCHES[case]
    expected = outcome(build(), inputs)
    assert_equal_outcomes(outcome(build(backend), inputs), expected)


def streams(valid: torch.Tensor, lengths: tuple[int, int, int], dtype: torch.dtype):
    """q (B, T, 3, 8), and keys and values of the three streams, all asking for gradients."""
    generator = torch.Generator().manual_seed(5)

    def normal(length: int) -> torch.Tensor:
        x = torch.randn(len(valid), length, 3, 8, generator=generator, dtype=dtype)
        return x.requires_grad_()

    return normal(lengths[0]), [normal(n) for n in lengths], [normal(n) for n in lengths]


def written_out(q, keys, values, valid) -> torch.Tensor:
    """Row by row, head by head, over the keys that count and no others."""
    k, v = torch.cat(keys, dim=1), torch.cat(values, dim=1)
    rows = []
    for row, counts in enumerate(valid):
        heads = []
        for head in range(q.shape[2]):
            scores = q[row, :, head] @ k[row, counts, head].T / math.sqrt(q.shape[3])
            weights = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
            heads.append(weights @ v[row, counts, head])
        rows.append(torch.stack(heads, dim=1))
    return torch.stack(rows)


LENGTHS = (140, 9, 130)
VALID = torch.cat([until([140, 20], 140), until([0, 4], 9), until([130, 0], 130)], dim=1)


@pytest.mark.parametrize("backend", ["sdpa", "matmul", "varlen", "flex", "flex itself"])
def test_attention_written_out_in_float64(backend, monkeypatch):
    q, keys, values = streams(VALID, LENGTHS, torch.float64)
    tensors = [q, *keys, *values]
    # Nobody reads padded frames, so no gradient comes from them.
    seen = torch.where(VALID[:, :140, None, None], torch.randn(q.shape, dtype=q.dtype), 0.0)
    expected = written_out(q, keys, values, VALID)
    expected_gradients = torch.autograd.grad((expected * seen).sum(), tensors)
    context = contextlib.nullcontext()
    if backend == "flex itself":
        backend, context = "flex", real_flex_attention(monkeypatch)
    with context:
        out = prepare_keys(backend, VALID, 140, q.dtype).attend(q, keys, values)
        gradients = torch.autograd.grad((out * seen).sum(), tensors)
    valid = VALID[:, :140]
    assert out.isfinite().all()
    torch.testing.assert_close(out[valid], expected[valid], rtol=0, atol=1e-12)
    for actual, wanted in zip(gradients, expected_gradients):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_block_mask_is_that_of_the_whole_mask():
    for valid, frames in ((VALID, 140), (torch.ones(1, 256, dtype=torch.bool), 128)):
        mine = prepare_keys("flex", valid, frames, torch.float32).blocks
        whole = create_block_mask(
            lambda b, h, query, key: valid[b, key], len(valid), None, frames, valid.shape[1], "cpu"
        )
        assert mine.seq_lengths == whole.seq_lengths and mine.BLOCK_SIZE == whole.BLOCK_SIZE
        for kind in ("kv", "full_kv", "q", "full_q"):
            count, listed = (getattr(mine, f"{kind}_{what}") for what in ("num_blocks", "indices"))
            assert torch.equal(count, getattr(whole, f"{kind}_num_blocks")), kind
            among = torch.arange(listed.shape[-1]) < count[..., None]
            assert torch.equal(listed[among], getattr(whole, f"{kind}_indices")[among]), kind
    assert mine.full_kv_num_blocks.flatten().tolist() == [2]  # the second case has full blocks only


def test_rows_of_no_sample_are_harmless(monkeypatch):
    monkeypatch.setattr(attention_backends, "packed_attention", poisoned_attention)
    for case in ("padding", "both dropped", "empty text"):
        expected = outcome(build(), BATCHES[case])
        assert_equal_outcomes(outcome(build("varlen"), BATCHES[case]), expected)


def test_packing_is_a_permutation_with_the_valid_rows_in_order():
    frames, keys, _ = prepare_keys("varlen", VALID, 140, torch.float32)
    assert frames.starts.tolist() == [0, 140, 160]
    assert keys.starts.tolist() == [0, 270, 294]
    assert frames.starts.dtype == keys.starts.dtype == torch.int32
    for packing in (frames, keys):
        place, valid = packing.place, packing.valid
        assert place.flatten().sort().values.tolist() == list(range(valid.numel()))
        assert place[valid].tolist() == list(range(packing.starts[-1]))
    rows = frames.unpack(frames.pack(torch.ones(2, 140, 1, 1)))
    assert torch.equal(rows[..., 0, 0], VALID[:, :140].float())


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


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_compiled_blocks(backend, checkpointing):
    """One graph a shape whatever counts, and the eager outcome, also where blocks run twice."""
    model = build(backend)
    shapes = [BATCHES["padding"], BATCHES["one row"]]
    expected = [outcome(build(), inputs) for inputs in shapes]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for number, layer in enumerate(model.layers):
        if checkpointing:
            model.layers[number] = layer = checkpoint_wrapper(layer)
        layer.compile(backend=counter, fullgraph=True, dynamic=False)
    for inputs, wanted in zip(shapes, expected):
        actual = outcome(model, inputs)
        assert_equal_outcomes(
            {n.replace("_checkpoint_wrapped_module.", ""): x for n, x in actual.items()}, wanted
        )
    hidden = {**shapes[0], "keep_text": torch.tensor([False, True, False])}
    model(**hidden)
    assert counter.frame_count == len(shapes)
    torch._dynamo.reset()


class NoSync(TorchDispatchMode):
    """Fails where a device would have to wait for the host or the host for the device: a value that
    is asked for, a shape that depends on values, a tensor that changes devices."""

    BY_VALUE = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.repeat_interleave.Tensor,
        torch.ops.aten.equal.default,
        torch.ops.aten._unique2.default,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.BY_VALUE, func
        if func is torch.ops.aten.index.Tensor:
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "index by a mask"
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, out)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", func
        return out


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
def test_bfloat16_on_a_cpu_is_matmuls(mask, monkeypatch):
    """Those of the encoders, too."""
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
def test_no_host_sync_in_the_step(backend):
    with torch.device("meta"):
        model = DiTTTSModel(replace(SMALL, attention=backend, condition_tokens=3))
    inputs = {name: x.to("meta") for name, x in BATCHES["padding"].items()}
    clean = inputs.pop("latents")
    place = torch.zeros((), dtype=torch.long, device="meta")
    rows = torch.arange(len(clean), device="meta")
    with NoSync():
        noisy = FlowMatching().add_noise(clean, place, rows, rows.sum())
        out = model(
            noisy.latents,
            noisy.t,
            *(
                inputs[name]
                for name in ("frame_mask", "text_ids", "text_mask", "speaker", "speaker_mask")
            ),
            noisy.keep_text,
            noisy.keep_speaker,
            inputs["text_features"],
            text_positions=inputs["text_positions"],
        )
        loss = squared_error_sums(out, noisy.target, inputs["frame_mask"]).sum() / 7
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.long
def test_the_config_chooses():
    kinds = {"sdpa": SdpaKeys, "matmul": MatmulKeys, "varlen": VarlenKeys, "flex": FlexKeys}
    kinds["auto"] = SdpaKeys
    for backend, kind in kinds.items():
        assert type(prepare_keys(backend, VALID, 140, torch.float32)) is kind
    with pytest.raises(ValueError, match="'dense' is not one of auto, sdpa, matmul, varlen, flex"):
        prepare_keys("dense", VALID, 140, torch.float32)


def test_the_backend_fits_device_and_dtype():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    choose = attention_backends.choose_backend
    assert choose("auto", cpu, torch.float32) == "sdpa"
    assert choose("auto", cpu, torch.bfloat16) == "matmul"
    assert choose("auto", cuda, torch.bfloat16) in BACKENDS[1:]
    assert choose("varlen", cuda, torch.bfloat16) == "varlen"
    assert choose("varlen", cuda, torch.float32) == "sdpa"  # flash attention has no float32
    assert choose("flex", cuda, torch.float32) == "flex"
