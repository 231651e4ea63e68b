"""Peak memory is the sum of its parts, and few passes predict what passes of other shapes hold."""

from dataclasses import replace

import pytest

from tests.helpers.plan_cases import H200, debug_config
from titan_tts.plan.activations import ActivationMemory, KindMemory, activation_memory
from titan_tts.plan.memory import Activations, capacity, largest_micro_batch, memory_need
from titan_tts.plan.parameters import model_sizes
from titan_tts.plan.states import StateMemory, UnshardedWeights
from torchtitan.models.dit_tts.model.flops import Lengths

pytestmark = pytest.mark.usefixtures("remembered_passes")

# Every part is another power of two, so that a sum shows which of them it has.
_SIZES = dict(gathered=UnshardedWeights(kept=16, transient=32), unsharded_gradients=64, encoder=128)
_SIZES |= dict(encoder_gathered=UnshardedWeights(kept=256, transient=512), encoder_units=3)
STATES = StateMemory(1, 2, 4, 8, **_SIZES, teacher=1024, offloaded=False)
LONGEST = Lengths(64, 40, 64)


def test_states_are_the_sum_of_their_parts():
    assert STATES.on_gpu == 2047
    assert replace(STATES, offloaded=True).on_gpu == 2047 - (1 + 2 + 4 + 8)


def test_a_micro_batch_fits_up_to_the_last_byte():
    # 1.5 GiB of context, and 4 % that the allocator cannot use.
    device = replace(H200, memory_gib=100.0)
    room = capacity(device)
    assert room == pytest.approx(94.5 * 2**30, abs=1)
    need = memory_need(1, ActivationMemory(batch=2, saved=4, working=room - 7), device)
    assert need.total == room and need.fits
    assert not memory_need(2, need.activations, device).fits
    for largest, found in ((0, 0), (1, 1), (77, 77), (9999, 4096)):
        assert largest_micro_batch(lambda samples, n=largest: samples <= n) == found


def test_activations_are_those_of_every_block():
    """Three blocks save 100 each, two checkpointed ones 10."""
    kinds = {"none": KindMemory(7, 1000, 100, 50, []), "full": KindMemory(7, 1001, 10, 60, [])}
    found = activation_memory({"none": 3, "full": 2}, kinds)
    assert found == ActivationMemory(batch=7, saved=1001 + 3 * 100 + 2 * 10, working=60)


@pytest.mark.long
@pytest.mark.parametrize(
    "components", [[], pytest.param(["model", "encoders"], marks=pytest.mark.slow)]
)
def test_few_passes_predict_other_shapes(components):
    compiled = components and ["--compile.enable", "--compile.components", *components]
    config = debug_config(*compiled)
    activations = Activations(model_sizes(config).args, LONGEST, 5)
    shape = 5, Lengths(40, 24, 48)
    measured, _ = activations.measured(config, True, *shape)
    predicted = activations.memory(config, True, *shape)
    assert predicted.batch == measured.batch
    # Tables of angles grow with the frames and not with the samples: little beside so small a model.
    assert predicted.saved == pytest.approx(measured.saved, rel=5e-3)
    assert predicted.working == pytest.approx(measured.working, rel=4e-2)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_a_memory_budget_is_the_compilers(sharded):
    """What it saves is decided at each shape: a prediction must be what passes of that shape hold."""
    budget = ["--compile.enable", "--activation_checkpoint.mode=memory_budget"]
    half, all_of_it = (
        debug_config(*budget, f"--activation_checkpoint.memory_budget={fraction}")
        for fraction in (0.5, 1.0)
    )
    args = replace(model_sizes(half).args, speaker_n_layers=1)
    activations = Activations(args, LONGEST, 4)
    shape = 8, Lengths(32, 24, 32)
    saved = activations.measured(half, sharded, *shape)[0].saved
    assert activations.memory(half, sharded, *shape).saved == saved
    assert saved < activations.measured(all_of_it, sharded, *shape)[0].saved
