"""The benchmarks' own parts: which cases are measured, and a distance."""

import torch

from benchmarks import few_steps, sampling
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling


def test_every_case_can_be_sampled_and_keeps_to_its_budget():
    cases = list(sampling.cases(Sampling(steps=32, text_scale=2.0), "bfloat16"))
    assert {case.group for case in cases} == set(sampling.GROUPS)
    names = [(case.group, case.budget, case.name) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        check_sampling(case.sampling)
        assert not case.budget or case.budget * 0.5 < sampling.passes(case.sampling) <= case.budget
    saved = [sampling.passes(case.sampling) for case in cases if case.group == "savings"]
    assert saved[0] == 32 * 2 and saved == sorted(saved, reverse=True)


def test_distance_is_relative_and_over_all_frames():
    wanted = [torch.full((3, 2), 2.0), torch.full((1, 2), 2.0)]
    found = [wanted[0] + 1.0, wanted[1] - 1.0]
    assert few_steps.distance(found, wanted) == 0.5
    found[0] = wanted[0]  # three of four frames are right
    assert few_steps.distance(found, wanted) == 0.25
