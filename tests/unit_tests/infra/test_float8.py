"""fp8 products: which layers, that training follows bfloat16's, and that weights stay loadable."""

import pytest
import torch
import torch.distributed as dist
from torchao.float8.config import ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchtitan.distributed import ParallelDims

from tests.helpers.small_models import initialized_model, small_args
from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.float8 import Float8Converter
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.model.model import DiTTTSModel

DIMS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
FLOAT8 = ["--model.converters=float8", "--quantize.linear.float8.emulate"]
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def config(*arguments: str):
    return load_config([*FLOAT8, "--activation_checkpoint.mode=none", *arguments])


def small_model(dim: int = 64) -> DiTTTSModel:
    return initialized_model(small_args(dim=dim, mlp_dim=96, text_vocab_size=20, adaln_rank=16))


def converted(*arguments: str) -> DiTTTSModel:
    model = small_model()
    Float8Converter(config(*arguments), DIMS).convert(model)
    return model


@pytest.fixture(autouse=True)
def inductors_setting():
    """The rowwise recipe changes it for the process."""
    with torch._inductor.config.patch(emulate_precision_casts=False):
        yield


def losses(model: DiTTTSModel, steps: int = 40) -> torch.Tensor:
    """A flow-matching run in bfloat16 on latents that text and time tell something about."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(20, 16, generator=generator)
    seen = []
    for _ in range(steps):
        ids = torch.randint(3, 20, (8, 6), generator=generator)
        # 24 frames and 6 tokens: sums over 8 samples' are not all multiples of 16.
        clean = basis[ids].repeat_interleave(4, dim=1)
        noise, t = torch.randn(clean.shape, generator=generator), torch.rand(8, generator=generator)
        noisy = (1 - t[:, None, None]) * clean + t[:, None, None] * noise
        with torch.autocast("cpu", torch.bfloat16):
            out = model(
                noisy,
                t,
                torch.ones(8, 24, dtype=torch.bool),
                ids,
                torch.ones(8, 6, dtype=torch.bool),
                torch.zeros(8, 8, 16),
                torch.ones(8, 8, dtype=torch.bool),
            )
            loss = (out - (noise - clean)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return torch.tensor(seen)


@pytest.mark.long
def test_only_the_matmuls_of_the_blocks_are_converted():
    names = {
        name for name, module in converted().named_modules() if isinstance(module, Float8Linear)
    }
    assert names == {
        f"layers.{layer}.{product}"
        for layer in range(2)
        for product in (
            "attention.qkv_gate",
            "attention.out",
            "attention.text_kv",
            "attention.speaker_kv",
            "mlp.gate_and_up",
            "mlp.down",
        )
    }
    model = converted("--quantize.linear.float8.filter_fqns=attention.text_kv,mlp")
    names = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert {name.split(".", 2)[2] for name in names} == {
        "attention.qkv_gate",
        "attention.out",
        "attention.speaker_kv",
    }


@pytest.mark.long
def test_the_recipe_is_that_of_the_config():
    """Scales of rows, and where asked for the weight's gradient without fp8; inner sizes are padded."""
    for recipe, granularity, casts_for_weights in (
        ("tensorwise", ScalingGranularity.TENSORWISE, ScalingType.DYNAMIC),
        ("rowwise", ScalingGranularity.AXISWISE, ScalingType.DYNAMIC),
        ("rowwise_with_gw_hp", ScalingGranularity.AXISWISE, ScalingType.DISABLED),
    ):
        with torch._inductor.config.patch(emulate_precision_casts=False):
            model = converted(f"--quantize.linear.float8.recipe_name={recipe}")
            assert torch._inductor.config.emulate_precision_casts == (recipe == "rowwise")
        made = model.layers[0].mlp.down.config
        assert made.cast_config_input.scaling_granularity == granularity
        assert made.cast_config_grad_output_for_grad_weight.scaling_type == casts_for_weights
        assert made.pad_inner_dim and made.emulate


@pytest.fixture(scope="module")
def bfloat16_losses():
    return losses(small_model())


BOUND = 0.02
"""Maximum difference of the mean loss of the last 10 of 40 steps from bfloat16's, as a fraction of what
bfloat16 has learned by then"""


def regret(found: torch.Tensor, bfloat16: torch.Tensor) -> float:
    learned = bfloat16[:5].mean() - bfloat16[-10:].mean()
    assert learned > 0.3 * bfloat16[:5].mean(), "nothing was learned that could be lost"
    return ((found[-10:].mean() - bfloat16[-10:].mean()) / learned).item()


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_follows_bfloat16(recipe, bfloat16_losses):
    found = losses(converted(f"--quantize.linear.float8.recipe_name={recipe}"))
    assert not torch.equal(found, bfloat16_losses)
    assert abs(regret(found, bfloat16_losses)) < BOUND


@pytest.mark.long
def test_a_width_that_fp8_cannot_take():
    model = small_model(dim=72)
    with pytest.raises(InputError, match=r"layers.0.attention.qkv_gate has the shape \(288, 72\)"):
        Float8Converter(config(), DIMS).convert(model)


def test_without_fp8_hardware_it_must_be_emulated(monkeypatch):
    monkeypatch.setattr(
        "torchtitan.models.dit_tts.infra.float8.has_cuda_capability", lambda *_: False
    )
    plain = load_config(["--model.converters=float8"])
    with pytest.raises(InputError, match="this GPU has no fp8.*emulate = true"):
        Float8Converter(plain, DIMS)


def float8_on_two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2)
    model = converted()
    parallelize_dit_tts(model, dims, config("--parallelism.data_parallel_shard_degree=2"))
    seen = losses(model, steps=3)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save((seen, state), f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_sharded_it_trains_as_whole(tmp_path):
    """Both ranks see the same data: gradients are twice the unsharded model's, and Adam scales them."""
    run_ranks(float8_on_two_ranks, 2, str(tmp_path))
    seen, state = torch.load(tmp_path / "found.pt")
    assert torch.allclose(seen, losses(converted(), steps=3), rtol=0.01)
    small_model().load_state_dict(state)  # a bfloat16 run takes an fp8 run's weights
