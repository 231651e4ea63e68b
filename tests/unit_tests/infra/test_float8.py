"""fp8 products: which layers, that training follows bfloat16's, and that weights stay loadable."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear

from tests.helpers.small_models import (
    full_inputs,
    initialized_model,
    one_rank,
    sharded_alone,
    small_args,
)
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.float8 import Float8Converter
from torchtitan.models.dit_tts.model.model import DiTTTSModel

DIMS = one_rank()
FLOAT8 = ["--model.converters=float8", "--quantize.linear.float8.emulate"]
BLOCK = {f"attention.{name}" for name in ("qkv_gate", "out", "text_kv", "speaker_kv")}
BLOCK |= {"mlp.gate_and_up", "mlp.down"}


def small_model() -> DiTTTSModel:
    return initialized_model(
        small_args(dim=64, mlp_dim=96, text_vocab_size=20, adaln_rank=16, speaker_dim=48)
    )


def converted(*arguments: str) -> DiTTTSModel:
    model = small_model()
    Float8Converter(load_config([*FLOAT8, *arguments]), DIMS).convert(model)
    return model


@pytest.fixture(autouse=True)
def inductors_setting():
    """The rowwise recipe changes it for the process."""
    with torch._inductor.config.patch(emulate_precision_casts=False):
        yield


def losses(model: DiTTTSModel, steps: int = 40) -> torch.Tensor:
    """A flow-matching run in bfloat16 on latents that depend on text and time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(20, 16, generator=generator)
    seen = []
    # 24 frames and 6 tokens: sums over 8 samples' are not all multiples of 16.
    inputs = full_inputs(model.args, 8, 24, 6, 8)
    inputs["speaker"].zero_()
    for _ in range(steps):
        inputs["text_ids"] = torch.randint(3, 20, (8, 6), generator=generator)
        clean = basis[inputs["text_ids"]].repeat_interleave(4, dim=1)
        noise, t = torch.randn(clean.shape, generator=generator), torch.rand(8, generator=generator)
        inputs |= {"latents": (1 - t[:, None, None]) * clean + t[:, None, None] * noise, "t": t}
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(**inputs) - (noise - clean)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return torch.tensor(seen)


def names_of(model: DiTTTSModel) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


@pytest.mark.long
def test_only_the_matmuls_of_the_blocks_are_converted():
    assert names_of(converted()) == {f"layers.{n}.{name}" for n in range(2) for name in BLOCK}
    some = names_of(converted("--quantize.linear.float8.filter_fqns=attention.text_kv,mlp"))
    left = {f"attention.{name}" for name in ("qkv_gate", "out", "speaker_kv")}
    assert {name.split(".", 2)[2] for name in some} == left
    small_model().load_state_dict(converted().state_dict())  # into a bfloat16 run


@pytest.fixture(scope="module")
def bfloat16_losses():
    return losses(small_model())


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_training_follows_bfloat16(recipe, bfloat16_losses):
    """The mean loss of the last 10 of 40 steps, by 2 % of the loss that bfloat16 has lost by then."""
    model = converted(f"--quantize.linear.float8.recipe_name={recipe}")
    assert torch._inductor.config.emulate_precision_casts == (recipe == "rowwise")
    made = model.layers[0].mlp.down.config
    assert (
        made.cast_config_input.scaling_granularity.value
        == {
            "tensorwise": "tensorwise",
            "rowwise": "axiswise",
        }[recipe]
    )
    assert made.pad_inner_dim and made.emulate
    found, expected = losses(model), bfloat16_losses
    learned = expected[:5].mean() - expected[-10:].mean()
    assert learned > 0.3 * expected[:5].mean() and not torch.equal(found, expected)
    assert (found[-10:].mean() - expected[-10:].mean()).abs() < 0.02 * learned


def test_a_gpu_without_fp8(monkeypatch):
    place = "torchtitan.models.dit_tts.infra.float8.has_cuda_capability"
    monkeypatch.setattr(place, lambda *version: version != (8, 9))
    with pytest.raises(InputError, match="this GPU has no fp8.*emulate = true"):
        Float8Converter(load_config(FLOAT8[:1]), DIMS)


@pytest.mark.long
def test_sharded_it_trains_as_whole(one_process_group):
    """On a mesh of one rank, where the weights are DTensors; a bfloat16 run takes what it saves."""
    model = sharded_alone(converted())
    assert torch.allclose(losses(model, steps=3), losses(converted(), steps=3), rtol=0.01)
    state = model.state_dict()
    assert isinstance(state["layers.0.mlp.down.weight"], DTensor) and len(names_of(model)) == 12
    small_model().load_state_dict({name: value.full_tensor() for name, value in state.items()})
