"""The loss of lengths and the figures that validation reports."""

import math

import pytest
import torch

from tests.helpers.small_models import until
from torchtitan.models.dit_tts.flow.duration import duration_figures, relative_error_sums

MASK = until([10, 4, 20], 24)
LOG_FRAMES = torch.tensor([10.9, 4.0, 17.0]).log()


def test_the_loss_is_the_relative_error_of_a_frame():
    sums = relative_error_sums(LOG_FRAMES, torch.zeros(3, 24, 2), MASK)
    expected = [10 * math.log(1.09), 0.0, 20 * math.log(20 / 17)]
    assert sums.tolist() == pytest.approx(expected, abs=1e-5)
    # A row of padding alone adds nothing.
    nothing = relative_error_sums(LOG_FRAMES[:1], torch.zeros(1, 24, 2), until([0], 24))
    assert nothing.tolist() == [0.0]


def test_figures():
    found = {name: of_row(LOG_FRAMES, MASK) for name, of_row in duration_figures(25.0).items()}
    assert found["seconds_error"].tolist() == pytest.approx([0.036, 0.0, 0.12], abs=1e-5)
    assert found["within_10_percent"].tolist() == [1.0, 1.0, 0.0]
    # 2.1 frames off are more than a tenth of the real 20, not of the predicted 22.1.
    within = duration_figures(25.0)["within_10_percent"]
    assert within(torch.tensor([22.1, 18.05]).log(), until([20, 20], 24)).tolist() == [0.0, 1.0]
