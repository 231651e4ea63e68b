"""Optimizers: who decays, what Muon and smaller states compute, and that a checkpoint has it all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchtitan.config import LRScheduler

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers.small_models import assert_equal, full_inputs, initialized_model, small_args
from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.config.job_config import JobConfig, Optimizer, Parallelism
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.optimizer import (
    TTSOptimizers,
    build_tts_lr_schedulers,
    build_tts_optimizers,
)
from torchtitan.models.dit_tts.infra.parallelize import _sum_gradients, apply_fsdp, write_sharded
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder

CONFIG = Optimizer(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9)
KINDS = {
    "AdamW": CONFIG,
    "Adam": replace(CONFIG, name="Adam"),
    "8bit": replace(CONFIG, state_dtype="8bit"),
    "Muon": replace(CONFIG, name="Muon"),
    "other width": replace(CONFIG, base_dim=16),
}


def build(model: nn.Module, config: Optimizer | str) -> TTSOptimizers:
    """config: or its name in KINDS."""
    return build_tts_optimizers([model], KINDS[config] if isinstance(config, str) else config, None)


TUNED = small_args(dim=16, mlp_dim=32, speaker_dim=12, text_vocab_size=20)


def small_model(**sizes: int) -> DiTTTSModel:
    """Large enough that the largest moments are quantised, also in thirds. Of its inputs, since its rates were TUNED,
    there are 64 / 16 in the decoder, 96 / 32 in its MLP's second half and 24 / 12 from the speaker."""
    wide = dict(dim=64, mlp_dim=96, text_vocab_size=20, tuned=TUNED)
    return initialized_model(small_args(**wide | sizes))


IMPLEMENTATIONS = [*KINDS.values(), replace(CONFIG, implementation="foreach")]


@pytest.mark.parametrize("config", IMPLEMENTATIONS)
def test_a_step_clips_its_gradients(config):
    """Of two steps the first is clipped: moments keep their ratio, which Adam's first update hides."""
    clipped, by_hand = small_model(), small_model()
    before = {name: p.detach().clone() for name, p in clipped.named_parameters()}
    optimizers = [build(model, config) for model in (clipped, by_hand)]
    torch.manual_seed(0)
    for size in (5.0, 0.001):
        pairs = list(zip(clipped.parameters(), by_hand.parameters(), strict=True))
        for parameter, other in pairs:
            parameter.grad = torch.randn_like(parameter) * size
            other.grad = parameter.grad.clone()
        norm = torch.cat([other.grad.flatten().double() for _, other in pairs]).norm().float()
        for _, other in pairs:
            other.grad *= min(1.0, 0.7 / norm.item())
        optimizers[0].step_unless(torch.zeros(()), norm, 0.7)
        optimizers[1].step()
    for name, parameter in by_hand.named_parameters():
        found = clipped.get_parameter(name)
        # Updates are of about 1e-2. Moments in 8 bits, and Muon's bfloat16 products, may round apart.
        narrow = config.name == "Muon" or config.state_dtype != "float32"
        close = 1e-3 if narrow else 2e-5
        torch.testing.assert_close(found, parameter, rtol=0, atol=close)
        assert (found - before[name]).abs().max() > 2e-3


@pytest.mark.parametrize("config", IMPLEMENTATIONS)
def test_a_bad_step_changes_nothing(config):
    model = small_model()
    optimizers = build(model, config)
    good, bad = torch.zeros(()), torch.ones(())

    def state() -> dict[str, torch.Tensor]:
        tensors = {**model.state_dict(), **optimizers.state_dict()}
        # torchao's tensors can do little else.
        return {
            name: value.dequantize() if "8bit" in type(value).__name__.lower() else value.clone()
            for name, value in tensors.items()
        }

    def step(flag: torch.Tensor, gradient: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizers.step_unless(flag, torch.ones(()), 3.0)

    step(good, 0.1)
    before = state()
    for gradient in (float("nan"), float("inf"), 1e30):
        step(bad, gradient)
        assert_equal(state(), before)
    step(good, 0.1)
    after = state()
    assert all(value.isfinite().all() for value in after.values())
    assert not any(torch.equal(after[n], before[n]) for n, _ in model.named_parameters())


def train(model: nn.Module, optimizers: TTSOptimizers, steps: range) -> None:
    """Steps whose data depend on their number alone, each rank with its part of the four samples."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine = slice(rank * 4 // world, (rank + 1) * 4 // world)
    for step in steps:
        generator = torch.Generator().manual_seed(step)

        def draw(*shape):
            return torch.randn(4, *shape, generator=generator)[mine]

        inputs = full_inputs(small_args(), len(range(4)[mine]), 8, 5, 8) | {
            "latents": draw(8, 16),
            "t": draw().sigmoid(),
            "text_ids": draw(5).mul(4).abs().long(),
            "speaker": draw(8, 16),
        }
        out = model(**inputs)
        (out - draw(8, 16)).square().sum().backward()
        optimizers.step()
        optimizers.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    values = model.state_dict().items()
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in values}


def distance(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of all weights together: what rounding does to a few of them counts little."""
    return sum((some[name] - other[name]).square().sum().item() for name in some) ** 0.5


def names_of(model: nn.Module, parameters) -> set[str]:
    wanted = set(parameters)
    return {name for name, value in model.named_parameters() if value in wanted}


class Pretrained(PretrainedTextEncoder):
    """A fake text encoder that is trained."""

    def __init__(self):
        nn.Module.__init__(self)
        self.core = nn.Linear(4, 4)


def rates(model: nn.Module, config: Optimizer) -> dict[str, tuple[float, float]]:
    """Learning rate and decay of each parameter."""
    found = {
        name: (group["lr"], group["weight_decay"])
        for optimizer in build(model, config).optimizers
        for group in optimizer.param_groups
        for name in names_of(model, group["params"])
    }
    assert found.keys() == dict(model.named_parameters()).keys()
    return found


PRODUCTS = ("attention.qkv_gate", "attention.out", "mlp.gate_and_up", "mlp.down")
BLOCK = (*PRODUCTS, "attention.text_kv", "attention.speaker_kv")


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_only_matrices_decay_and_groups_have_the_configs_settings(kind):
    model = small_model()
    found = rates(model, KINDS[kind])
    plain = {name for name, rate in found.items() if rate == (0.01, 0.0)}
    norms = {name for name in found if name.endswith((".bias", "norm.weight"))}
    assert plain == norms | {"text_encoder.embedding.weight"}
    assert "layers.0.attention.q_norm.weight" in norms
    assert all(found[name] == (0.01, 0.1) for name in found.keys() - plain)

    model.text_encoder = Pretrained()
    config = replace(KINDS[kind], beta1=0.7, beta2=0.8, eps=1e-5, encoder_lr=3e-4)
    [adam] = build(model, config).optimizers
    assert type(adam) is getattr(torch.optim, kind)
    assert all((g["betas"], g["eps"]) == ((0.7, 0.8), 1e-5) for g in adam.param_groups)
    found = rates(model, config)
    assert found["text_encoder.core.weight"] == (3e-4, 0.1)
    assert found["text_encoder.core.bias"] == (3e-4, 0.0)
    assert found["layers.0.mlp.down.weight"] == (1e-2, 0.1)


def test_muon_has_the_blocks_products_at_its_own_rate_and_adamw_the_rest():
    model = small_model()
    config = replace(KINDS["Muon"], muon_lr=0.5, beta1=0.7)
    adam, muon = build(model, config).optimizers
    [group] = muon.param_groups
    expected = {f"layers.{n}.{name}.weight" for n in range(2) for name in BLOCK}
    assert names_of(model, group["params"]) == expected
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    assert [group["betas"] for group in adam.param_groups] == [(0.7, 0.9)] * 2
    found = rates(small_model(), KINDS["Muon"])
    assert all(found[name] == (0.01, 0.1) for name in expected)
    # At one RMS an orthogonal update's spectral norm grows as the root of the width.
    found = rates(small_model(), replace(KINDS["Muon"], base_dim=16))
    by = {"mlp.down": 3**0.5, "attention.text_kv": 2**0.5, "attention.speaker_kv": 2**0.5}
    for name in BLOCK:
        slower = by.get(name, 2)
        assert found[f"layers.1.{name}.weight"] == pytest.approx((0.01 / slower, 0.1 * slower))
    assert found["output.weight"] == pytest.approx((0.01 / 4, 0.1 * 4))


@pytest.mark.parametrize("state_dtype", ["float32", "8bit"])
def test_matrices_whose_inputs_have_grown_have_smaller_rates(state_dtype):
    """At four times the inputs: a quarter of the rate and four times the decay."""
    model = small_model()
    config = replace(CONFIG, base_dim=16, state_dtype=state_dtype)
    found = rates(model, config)
    own = ("attention.qkv_gate", "attention.out", "mlp.gate_and_up")
    grown = {f"layers.1.{name}": 4 for name in (*own, "adaln.down")} | {"layers.1.mlp.down": 3}
    grown |= dict.fromkeys(("output", "timestep.layers.2", "timestep.layers.4"), 4)
    grown |= dict.fromkeys(("layers.1.attention.text_kv", "layers.1.attention.speaker_kv"), 2)
    grown |= {f"speaker_encoder.layers.0.{name}": 2 for name in own}
    for name in found.keys() - {name for name in found if name.startswith("layers.0.")}:
        by = grown.pop(name.removesuffix(".weight"), 1)
        assert found[name][0] == pytest.approx(0.01 / by), name
        assert found[name][1] in (pytest.approx(0.1 * by), *((0.0,) * (by == 1))), name
    assert not grown
    # What is logged is the rate of the config.
    optimizers = build(model, config).optimizers
    assert float(optimizers[0].param_groups[0]["lr"]) == pytest.approx(0.01)
    model.text_encoder = Pretrained()
    found = rates(model, replace(config, encoder_lr=3e-4))
    assert found["text_encoder.core.weight"] == (3e-4, 0.1)
    assert found["text_input.weight"] == (0.01, 0.1)  # its width is not the model's
    model.args.tuned = None
    with pytest.raises(InputError, match=r"base_dim = 16, but no flavor"):
        build(model, config)


@pytest.mark.parametrize(
    ("flavor", "base_dim", "by"),
    [
        ("300M", 512, {"decoder": 2, "mlp": 2, "adaln": 2, "speaker": 2, "text": 2}),
        ("8B", 2560, {"decoder": 1.6, "mlp": 1.6, "adaln": 1, "speaker": 1, "text": 2560 / 1152}),
    ],
)
def test_a_flavors_rates_follow_from_the_one_of_that_width(flavor, base_dim, by):
    job = JobConfig()
    job.encoder.n_heads, job.optimizer = 8, replace(CONFIG, base_dim=base_dim)
    args = model_flavors()[flavor]
    args.update_from_config(job)
    args.n_layers = args.tuned.n_layers = args.speaker_n_layers = args.tuned.speaker_n_layers = 1
    with torch.device("meta"):
        found = rates(DiTTTSModel(args), job.optimizer)
    expected = {"layers.0.attention.out": "decoder", "layers.0.mlp.down": "mlp"}
    expected |= {"layers.0.adaln.up": "adaln", "layers.0.attention.speaker_kv": "speaker"}
    expected |= {"speaker_encoder.layers.0.mlp.down": "speaker", "text_input": "text"}
    for name, part in expected.items():
        assert found[f"{name}.weight"] == pytest.approx((0.01 / by[part], 0.1 * by[part])), name
    assert found["input.weight"] == found["timestep.layers.0.weight"] == (0.01, 0.1)
    job.encoder.dim = 1280  # a width of its own, at both
    args.update_from_config(job)
    assert args.tuned.text_dim == 1280


def test_8bit_leaves_embeddings_to_float32_adamw():
    """In 8 bits the second moment of a row that steps do not use falls to 0 first, and its update explodes."""
    model = small_model(text_vocab_size=320)  # as large as torchao quantises
    kinds = {
        name: type(each)
        for each in build(model, "8bit").optimizers
        for group in each.param_groups
        for name in names_of(model, group["params"])
    }
    assert kinds.pop("text_encoder.embedding.weight") is torch.optim.AdamW
    assert kinds and torch.optim.AdamW not in kinds.values()


def save(optimizers: TTSOptimizers, folder) -> None:
    dcp.save(optimizers.state_dict(), checkpoint_id=str(folder), no_dist=not dist.is_initialized())


def load(optimizers: TTSOptimizers, folder) -> None:
    state = optimizers.state_dict()
    dcp.load(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    optimizers.load_state_dict(state)


def check_resume(kind: str, folder, make=small_model) -> None:
    """A run that is saved and loaded after two steps ends as one that continues."""
    model = make()
    optimizers = build(model, kind)
    train(model, optimizers, range(2))
    save(optimizers, folder)
    resumed = make()
    resumed.load_state_dict(model.state_dict())
    train(model, optimizers, range(2, 4))
    optimizers = build(resumed, kind)
    load(optimizers, folder)
    train(resumed, optimizers, range(2, 4))
    assert_equal(weights(resumed), weights(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_goes_on_exactly(tmp_path, kind):
    check_resume(kind, tmp_path)


RANKS = 3
"""That do not divide most sizes: some ranks quantise a moment whose other shards stay in float32"""


def sharded() -> nn.Module:
    model, mesh = small_model(), init_device_mesh("cpu", (RANKS,))
    apply_fsdp(model, mesh, MixedPrecisionPolicy(), Parallelism(), False)
    _sum_gradients(model)
    model.write_parameter = write_sharded
    with torch.no_grad():
        model.init_weights()
    return model


def train_shards(folder: Path) -> None:
    moved = {}
    for kind in ("8bit", "Muon", "other width"):
        check_resume(kind, f"{folder}/{kind}", sharded)
        model = sharded()
        train(model, build(model, kind), range(3))
        moved[kind] = weights(model)
    if dist.get_rank() == 0:
        torch.save(moved, folder / "moved.pt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_shards_resume_exactly_and_move_as_the_whole_does(tmp_path):
    run_ranks(ranks.run, RANKS, RANKS, tmp_path, [(train_shards, (tmp_path,), {})])
    for kind, end in torch.load(tmp_path / "moved.pt").items():
        model = small_model()
        start = weights(model)
        train(model, build(model, kind), range(3))
        # Sums of parts differ in the last bit, which 8 bits may make larger.
        apart, moved = distance(weights(model), end), distance(weights(model), start)
        assert apart < 0.02 * moved, kind


def test_the_schedule_reaches_every_optimizer_and_survives_other_groups():
    optimizers = build(small_model(), replace(CONFIG, name="Muon", muon_lr=0.5))
    schedulers = build_tts_lr_schedulers(optimizers, LRScheduler(warmup_steps=4), 10)
    optimizers.step()
    schedulers.step()
    adam, muon = optimizers.optimizers
    assert [group["lr"] for group in adam.param_groups] == pytest.approx([1e-2 * 2 / 4] * 2)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.5 * 2 / 4)
    # Into a run with other optimizers and learning rates: the position counts.
    other = build(small_model(), replace(KINDS["8bit"], lr=3.0))
    loaded = build_tts_lr_schedulers(other, LRScheduler(warmup_steps=4), 10)
    loaded.load_state_dict(schedulers.state_dict())
    groups = [group for adam in other.optimizers for group in adam.param_groups]
    assert [float(group["lr"]) for group in groups] == [1.5] * 3


def test_a_longer_run_continues_from_the_stable_part():
    model = small_model()

    def schedule_of(steps: int, first: int = 0, saved: dict | None = None) -> list[float]:
        optimizers = build(model, replace(CONFIG, lr=1.0))
        schedule = LRScheduler(warmup_steps=4, decay_ratio=0.2, decay_type="sqrt")
        schedulers = build_tts_lr_schedulers(optimizers, schedule, steps)
        schedulers.load_state_dict(saved or schedulers.state_dict())
        found = []
        for _ in range(first, steps):
            found.append(schedulers.schedulers[0].get_last_lr()[0])
            schedulers.step()
        return found

    short, long = schedule_of(20), schedule_of(40)
    assert short[:17] == [0.25, 0.5, 0.75, 1.0] + [1.0] * 13
    # The last step, not a step after it, ends above 0.
    assert short[17:] == pytest.approx([1 - (n / 4) ** 0.5 for n in (1, 2, 3)])
    assert long[:33] == short[:4] + [1.0] * 29 and long[33] < 1.0
    assert schedule_of(40, 12, {"last_epoch": 12}) == long[12:]
