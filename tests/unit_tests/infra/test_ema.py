"""The moving average of the weights: its arithmetic, and what a checkpoint keeps."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.helpers.small_models import random_model, small_args
from torchtitan.models.dit_tts.infra.ema import EMA, saved_prefixes
from torchtitan.models.dit_tts.infra.parallelize import apply_fsdp
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.validation.history import weights_name

ARGS = small_args(dim=16, latent_channels=4)


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


def average_of(ema: EMA) -> dict[str, torch.Tensor]:
    [average] = ema.averages.values()
    return average


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_follows_its_formula():
    model = small_net()
    ema = EMA(model, [0.5])
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
        for name, average in average_of(ema).items():
            torch.testing.assert_close(average, expected[name], rtol=0, atol=1e-5)
    assert 25 / 34 > 0.5  # the bound has been reached
    assert not any(average.requires_grad for average in average_of(ema).values())


def test_kept_in_float32_beside_bfloat16_weights():
    """Steps of 1e-4 of a difference are below bfloat16's resolution and would be lost."""
    model = small_net().bfloat16()
    ema = EMA(model, [0.999])
    ema.num_updates = 10**6  # past the warm-up
    start = {name: value.clone() for name, value in average_of(ema).items()}
    assert all(value.dtype == torch.float32 for value in start.values())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    target = weights_of(model)
    for _ in range(50):
        ema.update()
    for name, value in average_of(ema).items():
        expected = target[name].float() + (start[name] - target[name].float()) * 0.999**50
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


def test_names_are_those_of_the_plain_model():
    model = small_net()
    names = [name for name, _ in model.named_parameters()]
    model[0] = checkpoint_wrapper(model[0])
    assert "0._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
    assert list(EMA(model, [0.9]).state_dict()) == [
        "num_updates",
        *(f"decay-0.9.{name}" for name in names),
    ]


def test_a_checkpoint_continues_it_exactly(tmp_path):
    model = small_net()
    ema = EMA(model, [0.99])
    for step in range(4):
        move(model, step)
        ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path, no_dist=True)

    other = small_net(seed=1)
    resumed = EMA(other, [0.99])
    dcp.load({"ema": resumed}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(model.state_dict())
    assert resumed.num_updates == 4
    for step in range(4, 6):
        for m, e in ((model, ema), (other, resumed)):
            move(m, step)
            e.update()
    for name, value in average_of(ema).items():
        assert torch.equal(average_of(resumed)[name], value)


def averaged(decays, steps: int = 6) -> tuple[torch.nn.Module, EMA]:
    model = small_net()
    ema = EMA(model, decays)
    for step in range(steps):
        move(model, step)
        ema.update()
    return model, ema


def test_each_horizon_is_an_average_of_its_own():
    _, both = averaged([0.1, 0.4])
    for decay in (0.1, 0.4):
        _, alone = averaged([decay])
        for name, value in average_of(alone).items():
            assert torch.equal(both.averages[decay][name], value)
    assert not torch.equal(both.averages[0.1]["0.weight"], both.averages[0.4]["0.weight"])


def test_decays_of_many_digits_have_names_of_their_own():
    ema = EMA(small_net(), [0.9999995, 0.99995])
    saved = saved_prefixes([f"ema.{name}" for name in ema.state_dict()])
    assert saved == ["decay-0.99995.", "decay-0.9999995."]
    assert [weights_name(each) for each in saved] == ["ema:0.99995", "ema:0.9999995"]


def test_one_saved_average_begins_every_other(tmp_path):
    _, old = averaged([0.1, 0.4])
    slow = {name: value.clone() for name, value in old.averages[0.4].items()}
    dcp.save({"ema": old}, checkpoint_id=tmp_path, no_dist=True)
    table = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert saved_prefixes(table) == ["decay-0.1.", "decay-0.4."]
    resumed = EMA(small_net(seed=1), [0.4, 0.999])
    resumed.read_from(table)
    dcp.load({"ema": resumed}, checkpoint_id=tmp_path, no_dist=True)
    for decay in (0.4, 0.999):
        for name, value in slow.items():
            assert torch.equal(resumed.averages[decay][name], value)
    assert "decay-0.999.0.weight" in resumed.state_dict()  # under its own name from then on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_in_the_place_of_the_weights_and_back(dtype):
    model = small_net().to(dtype)
    ema = EMA(model, [0.3, 0.6])
    for step in range(4):
        move(model, step)
        ema.update()
    weights = weights_of(model)
    average = {name: value.clone() for name, value in ema.averages[0.3].items()}
    try:
        with ema.in_place_of_weights(0.3):
            for name, value in weights_of(model).items():
                assert torch.equal(value, average[name].to(dtype))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    for name, value in weights_of(model).items():
        assert torch.equal(value, weights[name])
        assert torch.equal(ema.averages[0.3][name], average[name])


def test_it_begins_anew_with_the_weights_that_were_loaded():
    model, ema = averaged([0.3, 0.6])
    move(model, 9)
    ema.restart()
    assert ema.num_updates == 0
    for average in ema.averages.values():
        for name, value in weights_of(model).items():
            assert torch.equal(average[name], value)


# Under FSDP


def sharded_model(seed: int) -> DiTTTSModel:
    model = random_model(ARGS, seed)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, precision, reshard_after_forward=True, cpu_offload=False)
    return model


def test_a_plain_checkpoint_loads_into_a_sharded_average(one_process_group, tmp_path):
    plain = random_model(ARGS, 0)
    ema = EMA(plain, [0.9])
    ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path)
    sharded = EMA(sharded_model(1), [0.9])
    dcp.load({"ema": sharded}, checkpoint_id=tmp_path)
    assert sharded.num_updates == 1 and average_of(sharded).keys() == average_of(ema).keys()
    for name, value in average_of(ema).items():
        assert isinstance(average_of(sharded)[name], DTensor)
        assert torch.equal(average_of(sharded)[name].full_tensor(), value)
