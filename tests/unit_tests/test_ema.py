"""The moving average of the weights: its arithmetic, the swap, and what a checkpoint keeps."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.parallelize import apply_fsdp
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

ARGS = DiTTTSModelArgs(
    dim=16,
    n_layers=2,
    n_heads=2,
    mlp_dim=24,
    speaker_dim=8,
    speaker_n_layers=1,
    speaker_n_heads=2,
    speaker_mlp_dim=8,
    latent_channels=4,
    text_dim=8,
    adaln_rank=4,
    timestep_dim=8,
)


def small_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


@torch.no_grad()
def move(model: torch.nn.Module, seed: int) -> None:
    """As an optimizer step does: in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.add_(torch.randn(local.shape, generator=generator))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_follows_its_formula():
    model = small_net()
    ema = EMA(model, decay=0.5)
    expected = None
    for n in range(25):
        move(model, n)
        ema.update()
        decay = min(0.5, n / (9 + n))
        weights = weights_of(model)
        expected = {
            name: decay * expected[name] + (1 - decay) * w if n else w
            for name, w in weights.items()
        }
        for name, average in ema.shadow.items():
            torch.testing.assert_close(average, expected[name], rtol=0, atol=1e-5)
    assert 25 / 34 > 0.5  # the bound has been reached
    assert not any(average.requires_grad for average in ema.shadow.values())


def test_first_update_copies():
    model = small_net()
    ema = EMA(model, decay=0.9999)
    move(model, 1)  # as loaded weights do that replace those it was built from
    ema.update()
    for name, p in model.named_parameters():
        assert torch.equal(ema.shadow[name], p)


def test_average_moves_at_an_update_only():
    model = small_net()
    ema = EMA(model, decay=0.9)
    ema.update()
    before = {name: value.clone() for name, value in ema.shadow.items()}
    move(model, 1)
    for name, value in before.items():
        assert torch.equal(ema.shadow[name], value)


@pytest.mark.parametrize("fails", [False, True])
def test_swap_puts_the_average_in_and_gives_the_weights_back(fails):
    model = small_net()
    ema = EMA(model, decay=0.9)
    for step in range(3):
        move(model, step)
        ema.update()
    trained, x = weights_of(model), torch.ones(1, 3)
    averaged = {name: value.clone() for name, value in ema.shadow.items()}
    expected = torch.func.functional_call(model, averaged, x)
    try:
        with ema.swapped():
            assert torch.equal(model(x), expected)
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    for name, p in model.named_parameters():
        assert torch.equal(p, trained[name])
        assert torch.equal(ema.shadow[name], averaged[name])


def test_names_are_those_of_the_plain_model():
    model = small_net()
    names = [name for name, _ in model.named_parameters()]
    model[0] = checkpoint_wrapper(model[0])
    assert "0._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
    assert list(EMA(model, 0.9).state_dict()) == ["num_updates", *names]


def test_a_checkpoint_continues_it_exactly(tmp_path):
    model = small_net()
    ema = EMA(model, decay=0.99)
    for step in range(4):
        move(model, step)
        ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path, no_dist=True)

    other = small_net(seed=1)
    resumed = EMA(other, decay=0.99)
    dcp.load({"ema": resumed}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(model.state_dict())
    assert resumed.num_updates == 4
    for step in range(4, 6):
        for m, e in ((model, ema), (other, resumed)):
            move(m, step)
            e.update()
    for name, value in ema.shadow.items():
        assert torch.equal(resumed.shadow[name], value)


# Under FSDP


def plain_model(seed: int) -> DiTTTSModel:
    torch.manual_seed(seed)
    model = DiTTTSModel(ARGS)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    return model


def sharded_model(seed: int) -> DiTTTSModel:
    model = plain_model(seed)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, precision, reshard_after_forward=True, cpu_offload=False)
    return model


def batch() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    every = torch.ones(2, 6, dtype=torch.bool)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return (
        normal(2, 6, 4), torch.tensor([0.2, 0.9]), every, normal(2, 3, 8), every[:, :3],
        normal(2, 4, 4), every[:, :4],
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_swap_under_fsdp_leaves_no_trace(one_process_group):
    """The last unit stays gathered after a forward pass: it must not keep the other weights."""
    model, plain = sharded_model(0), plain_model(0)
    ema = EMA(model, decay=0.9)
    ema.update()
    move(model, 1)

    def train_pass(m):
        out = m(*batch())
        out.square().sum().backward()
        m.zero_grad()
        return out.detach()

    with torch.no_grad():
        averaged = plain(*batch())
    move(plain, 1)
    trained = train_pass(plain)
    assert (trained - averaged).abs().max() > 0.1
    torch.testing.assert_close(train_pass(model), trained, rtol=0, atol=1e-5)
    for _ in range(2):
        with ema.swapped(), torch.no_grad():
            torch.testing.assert_close(model(*batch()), averaged, rtol=0, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(*batch()), trained, rtol=0, atol=1e-5)
        torch.testing.assert_close(train_pass(model), trained, rtol=0, atol=1e-5)


def test_a_plain_checkpoint_loads_into_a_sharded_average(one_process_group, tmp_path):
    plain = plain_model(0)
    ema = EMA(plain, decay=0.9)
    ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path)
    sharded = EMA(sharded_model(1), decay=0.9)
    dcp.load({"ema": sharded}, checkpoint_id=tmp_path)
    assert sharded.num_updates == 1 and sharded.shadow.keys() == ema.shadow.keys()
    for name, value in ema.shadow.items():
        assert isinstance(sharded.shadow[name], DTensor)
        assert torch.equal(sharded.shadow[name].full_tensor(), value)
