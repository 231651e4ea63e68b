"""The benchmarks' own parts: which cases are measured, and the error of a pitch."""

import numpy as np
import pytest

from benchmarks import sampling
from benchmarks.codec import pitch_errors
from tests.helpers.small_models import small_args
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


def test_errors_of_the_pitch():
    pitch, voiced = np.full(8, 200.0), np.array([1, 1, 1, 1, 1, 0, 0, 0], bool)
    other = np.array([200, 200, 200 * 2 ** (10 / 1200), 202, 400, 90, 90, 90.0, 90])
    heard = np.array([1, 1, 1, 1, 1, 1, 0, 0, 1], bool)  # one frame longer than the other
    found = pitch_errors((pitch, voiced), (other, heard))
    assert found["pitch_cents"] == pytest.approx(10) and found["pitch_far_off"] == 20
    assert found["voicing_wrong"] == 12.5
    silent = pitch_errors((pitch, ~voiced), (other[:5], heard[:5]))
    assert np.isnan(silent["pitch_cents"]) and silent["voicing_wrong"] == 100


@pytest.mark.slow
def test_traffic_of_a_block_counts_its_weights_and_its_norms():
    from benchmarks.block_traffic import block_traffic

    args = small_args()
    for own_norm, kernels in ((False, 0), (True, 2)):
        forward, backward = block_traffic(args, (2, 16, 8, 8), own_norm)
        assert forward["own kernels"] == kernels
        assert backward["own kernels"] in (kernels, 2 * kernels)  # forward's may be repeated
        # Six products, two of AdaLN's, attention.
        assert forward["library kernels"] == 6 + 2 + 1
        x, modulation = (2 * samples * args.dim * 2 for samples in (16, 6))  # bytes
        assert forward["own bytes"] == kernels * (x + x + modulation)
        assert backward["generated kernels"] > forward["generated kernels"] > 10
