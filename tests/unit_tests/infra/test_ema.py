"""The moving average of the weights: its arithmetic, and what a checkpoint keeps."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from tests.helpers.small_models import assert_equal, random_model, sharded_alone, small_args
from torchtitan.models.dit_tts.config.validation_figures import saved_prefixes
from torchtitan.models.dit_tts.infra.ema import EMA


def small_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


@torch.no_grad()
def train(model: torch.nn.Module, ema: EMA, steps: range) -> None:
    """Moves the weights in place, as an optimizer does, and averages them."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        ema.update()


def averaged(decays, steps: int = 6) -> tuple[torch.nn.Module, EMA]:
    model = small_net()
    ema = EMA(model, decays)
    train(model, ema, range(steps))
    return model, ema


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_averages_follow_their_formula():
    decays, model, expected = (0.3, 0.5), small_net(), {}
    ema = EMA(model, decays)
    for n in range(25):
        train(model, ema, range(n, n + 1))
        for beta in decays:
            decay = min(beta, n / (9 + n))
            for name, weight in weights_of(model).items():
                before = expected.get((beta, name), weight)
                expected[beta, name] = decay * before + (1 - decay) * weight
                torch.testing.assert_close(
                    ema.averages[beta][name], expected[beta, name], rtol=0, atol=1e-5
                )
    assert not any(average.requires_grad for average in ema.averages[0.5].values())


def test_names_have_the_decay_and_the_plain_models_parameter():
    model = small_net()
    names = list(weights_of(model))
    model[0] = checkpoint_wrapper(model[0])
    assert "0._checkpoint_wrapped_module.weight" in weights_of(model)
    expected = ["num_updates", *(f"decay-0.9.{name}" for name in names)]
    assert list(EMA(model, [0.9]).state_dict()) == expected
    saved = saved_prefixes(
        [f"ema.{name}" for name in EMA(model, [0.9999995, 0.99995]).state_dict()]
    )
    assert saved == ["decay-0.99995.", "decay-0.9999995."]


def test_a_checkpoint_continues_it_exactly_and_starts_other_decays_from_the_slowest(tmp_path):
    model, ema = averaged([0.1, 0.4])
    slowest = {name: value.clone() for name, value in ema.averages[0.4].items()}
    dcp.save({"ema": ema}, checkpoint_id=tmp_path, no_dist=True)
    table = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    other = small_net(seed=1)
    resumed = EMA(other, [0.4, 0.999])
    resumed.read_from(table)
    dcp.load({"ema": resumed}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(model.state_dict())
    assert resumed.num_updates == 6
    for decay in (0.4, 0.999):
        assert_equal(resumed.averages[decay], slowest)
    assert "decay-0.999.0.weight" in resumed.state_dict()  # under its own name from then on
    for m, e in ((model, ema), (other, resumed)):
        train(m, e, range(6, 8))
    assert_equal(resumed.averages[0.4], ema.averages[0.4])


def test_an_average_in_the_place_of_the_weights_and_back():
    model, ema = averaged([0.3, 0.6])
    weights = weights_of(model)
    average = {name: value.clone() for name, value in ema.averages[0.3].items()}
    with pytest.raises(KeyboardInterrupt), ema.in_place_of_weights(0.3):
        assert_equal(weights_of(model), average)
        raise KeyboardInterrupt
    assert_equal(weights_of(model), weights)
    assert_equal(ema.averages[0.3], average)
    ema.restart()  # with the present weights
    assert ema.num_updates == 0
    for each in ema.averages.values():
        assert_equal(each, weights)


def test_a_plain_checkpoint_loads_into_a_sharded_average(one_process_group, tmp_path):
    args = small_args(dim=16, latent_channels=4)
    ema = EMA(random_model(args, 0), [0.9])
    ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path)
    sharded = EMA(sharded_alone(random_model(args, 1)), [0.9])
    dcp.load({"ema": sharded}, checkpoint_id=tmp_path)
    found = sharded.averages[0.9]
    assert sharded.num_updates == 1 and all(isinstance(v, DTensor) for v in found.values())
    assert_equal({name: v.full_tensor() for name, v in found.items()}, ema.averages[0.9])
