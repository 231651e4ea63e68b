"""The table of benchmarks/few_steps.py."""

import torch

from benchmarks import few_steps


def test_distance_is_relative_and_over_all_frames():
    wanted = [torch.full((3, 2), 2.0), torch.full((1, 2), 2.0)]
    found = [wanted[0] + 1.0, wanted[1] - 1.0]
    assert few_steps.distance(found, wanted) == 0.5
    found[0] = wanted[0]  # three of four frames are right
    assert few_steps.distance(found, wanted) == 0.25


def test_a_row_compares_with_the_first():
    figures = {"value": 0.011, "low": 0.0, "high": 0.02}
    first = {
        "name": "teacher",
        "network_passes": 48,
        "wer": figures,
        "against_teacher": {},
        "distance": 0.0,
        "speaker_similarity": {"value": 0.9},
        "real_time_factor": 0.3,
    }
    tie = {"wer": {"verdict": "tie"}}
    student = first | {"name": "s", "against_teacher": tie, "real_time_factor": 0.1}
    *_, head, above, below = few_steps.table([first, student]).splitlines()
    assert head.count("|") == above.count("|") == below.count("|") == 9
    assert below == "| s | 48 | 1.1 % (0.0 to 2.0) | tie | 0.00 | 0.900 | 0.100 | 3.0 |"
