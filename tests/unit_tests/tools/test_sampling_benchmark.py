"""Which cases benchmarks/sampling.py measures."""

from benchmarks import sampling as benchmark
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling

BASE = Sampling(steps=32, text_scale=2.0)


def test_every_case_can_be_sampled_and_keeps_to_its_budget():
    cases = list(benchmark.cases(BASE, "bfloat16"))
    assert {case.group for case in cases} == set(benchmark.GROUPS)
    names = [(case.group, case.budget, case.name) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        check_sampling(case.sampling)
        assert not case.budget or case.budget * 0.5 < benchmark.passes(case.sampling) <= case.budget
    saved = [benchmark.passes(case.sampling) for case in cases if case.group == "savings"]
    assert saved[0] == 32 * 2 and saved == sorted(saved, reverse=True)
