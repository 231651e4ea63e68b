"""Which cases benchmarks/sampling.py measures, and how its table says what was found."""

import pytest

from benchmarks import sampling as benchmark
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling

BASE = Sampling(steps=32, text_scale=2.0)


def passes(sampling):
    return benchmark.passes(sampling)


@pytest.mark.parametrize(
    "settings, budget, steps",
    [
        ({}, 48, 32),  # 16 of 32 are guided
        ({"solver": "midpoint"}, 48, 32),
        ({"text_scale": 0.0}, 48, 48),
        ({"schedule": "epss"}, 48, 16),
        ({"schedule": "epss", "solver": "heun"}, 48, 24),
        ({"zero_init_steps": 1}, 12, 9),  # one of nine is left out, with its guidance
    ],
)
def test_a_case_has_the_most_evaluations_within_its_budget(settings, budget, steps):
    base = Sampling(**{"text_scale": 2.0, **settings})
    found = benchmark.within(base, budget)
    assert found.steps == steps and passes(found) <= budget


def test_nothing_fits_into_too_small_a_budget():
    assert benchmark.within(Sampling(schedule="epss"), 4) is None


def test_every_case_can_be_sampled_and_keeps_to_its_budget():
    cases = list(benchmark.cases(BASE, "bfloat16"))
    assert {case.group for case in cases} == set(benchmark.GROUPS)
    names = [(case.group, case.budget, case.name) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        check_sampling(case.sampling)
        assert not case.budget or case.budget * 0.5 < passes(case.sampling) <= case.budget
    saved = [passes(case.sampling) for case in cases if case.group == "savings"]
    assert saved[0] == 32 * 2 and saved == sorted(saved, reverse=True)


def test_the_table_has_a_part_for_every_group_and_budget():
    interval = {"value": 0.02, "low": 0.01, "high": 0.03}
    row = {
        "name": "midpoint",
        "group": "solvers",
        "budget": 24,
        "sampling": {"steps": 16},
        "network_passes": 24,
        "real_time_factor": 0.05,
        "wer": interval,
        "speaker_similarity": None,
        "against_first": {"wer": {**interval, "verdict": "tie"}},
    }
    text = benchmark.tables([row, {**row, "budget": 12}, {**row, "group": "savings", "budget": 0}])
    assert "**solvers, at most 24 passes**" in text and "**savings**" in text
    assert text.count("| midpoint | 16 | 24 | 2.0 % (1.0 to 3.0) | tie | - |  | 0.050 |") == 3


def test_a_run_that_is_not_there():
    refused(lambda: benchmark.main(["nothing"]), "nothing")
