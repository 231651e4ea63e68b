"""Which row of validation.jsonl is the best."""

import pytest

from torchtitan.models.dit_tts.validation.history import best_row, read_rows


def rows(**figures: list) -> list[dict]:
    names, count = list(figures), len(next(iter(figures.values())))
    return [
        {"step": 10 * (n + 1), **{name: figures[name][n] for name in names}} for n in range(count)
    ]


@pytest.mark.parametrize(
    "figure, values, step",
    [
        ("best_heldout_loss", [0.5, 0.3, 0.4], 20),
        ("heldout_loss_at_0.9", [0.5, 0.6, 0.4], 30),
        ("gap", [0.5, -0.6, 0.4], 20),
        ("wer", [0.0, 0.1, 0.1], 10),  # 0 is a figure
        ("text_gain", [0.5, 0.6, 0.4], 20),
        ("opinion_raw", [1.0, 4.0, 3.0], 20),
        ("best_heldout_loss", [0.4, 0.3, 0.3], 20),  # the first of equal ones
        ("text_gain", [None, None, -0.5], 30),
        ("best_heldout_loss", [None, 9.0, None], 20),
        *[(name, [0.5, 0.6, 0.4], 20) for name in ("speaker_gain", "speaker_similarity_raw")],
        *[(name, [0.5, 0.6, 0.4], 20) for name in ("within_10_percent", "opinion")],
        *[(name, [0.5, 0.6, 0.4], 30) for name in ("cer_raw", "seconds_error_at_1", "opinions")],
        ("wer", [None, None, None], None),
    ],
)
def test_best(figure, values, step):
    best = best_row(rows(**{figure: values}), figure)
    assert (best and best["step"]) == step


def test_none_is_best_where_nothing_is_measured():
    assert best_row([], "best_heldout_loss") is None
    assert best_row(rows(heldout_loss=[0.1, 0.2]), "wer") is None
    assert best_row(rows(heldout_loss=[0.1]), "") is None
    # Rows of samples and of losses lie in one file.
    mixed = [{"step": 1, "wer": 0.3}, {"step": 1, "heldout_loss": 1.0}, {"step": 2, "wer": 0.1}]
    best = best_row(mixed, "wer")
    assert best is not None and best["step"] == 2


def test_rows_in_order_of_their_steps(tmp_path):
    assert read_rows(tmp_path) == []
    lines = ['{"step": 20, "wer": 1}', '{"step": 10, "wer": 2}', "{torn"]
    (tmp_path / "validation.jsonl").write_text("\n".join(lines))
    assert [row["step"] for row in read_rows(tmp_path)] == [10, 20]
