"""Which row of validation.jsonl is the best."""

import pytest

from torchtitan.models.dit_tts.validation.history import best_row, read_rows


@pytest.mark.parametrize(
    "figure, values, step",
    [
        ("best_heldout_loss", [0.5, 0.3, 0.3], 20),  # the first of equal ones
        ("heldout_loss_at_0.9", [0.5, 0.6, 0.4], 30),
        ("gap", [0.5, -0.6, 0.4], 20),
        ("wer", [0.0, 0.1, 0.1], 10),  # 0 is a figure
        ("text_gain", [None, None, -0.5], 30),
        ("best_heldout_loss", [None, 9.0, None], 20),
        *[(name, [0.5, 0.6, 0.4], 20) for name in ("text_gain", "speaker_gain", "opinion")],
        *[(name, [0.5, 0.6, 0.4], 20) for name in ("speaker_similarity", "within_10_percent")],
        *[(name, [0.5, 0.6, 0.4], 30) for name in ("cer", "seconds_error_at_1", "opinions")],
        ("wer", [None, None, None], None),
        ("wer", [], None),
    ],
)
def test_best(figure, values, step):
    """Rows of samples and of losses lie in one file."""
    rows = [{"step": 10 * number, figure: value} for number, value in enumerate(values, 1)]
    best = best_row([{"step": 5, "another": 0.0}, *rows], figure)
    assert (best and best["step"]) == step


def test_rows_in_order_of_their_steps(tmp_path):
    assert read_rows(tmp_path) == []
    lines = ['{"step": 20, "wer": 1}', '{"step": 10, "wer": 2}', "{torn"]
    (tmp_path / "validation.jsonl").write_text("\n".join(lines))
    assert [row["step"] for row in read_rows(tmp_path)] == [10, 20]
