"""validation.jsonl of a run: one row per validation and per set of samples, and the best of them.

A row of a validation:

    {"step", "time", "seconds", "samples",
     "weights": "ema:0.9999"          whose figures the plain names have: the slowest average, else "raw"
     "heldout_loss", "training_loss", "gap",    means over the fixed times; gap = held-out - training
     "text_gain", "speaker_gain", "caption_gain",    loss with another's text (reference, caption) - loss; null where
                                      none differs
     "seconds_error", "within_10_percent"    of a duration predictor: the mean error in seconds, and the
                                      fraction of the samples whose length is wrong by 10 % at most
     "heldout_loss_at_0.99" ...       each of them at each time
     "heldout_loss_raw", "gap_ema:0.999" ...    of all weights
     "best_heldout_loss", "best_weights"}       the lowest of all weights, and which have it

and of a set of samples {"step", "time", "seconds", "weights", "wer", "cer", "speaker_similarity", "opinion",
"real_time_factor", "duration_error" (of a model that ends the speech itself)}.
"""

from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.config.validation_figures import is_higher_better
from torchtitan.models.dit_tts.files import JsonLines

RAW, BEST = "raw", "best"


def weights_name(prefix: str) -> str:
    """Name of an average by its prefix in a checkpoint ("decay-0.999.")."""
    return f"ema:{prefix[6:-1]}"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, in order of steps; [] without any."""
    return sorted(JsonLines(folder / "validation.jsonl").read(), key=lambda row: row["step"])


def best_row(rows: list[dict[str, Any]], figure: str) -> dict[str, Any] | None:
    """The first row with the best value of a figure; None where none has it."""
    measured = [row for row in rows if row.get(figure) is not None]
    sign = -1 if is_higher_better(figure) else 1
    return min(measured, key=lambda row: sign * row[figure], default=None)


def weights_of(row: dict[str, Any], figure: str) -> str:
    """The weights that a row's figure is of: those in its name, else the row's."""
    if figure == "best_heldout_loss":
        return row.get("best_weights", "ema")
    at = figure.rfind("_ema:")
    if at >= 0:
        return figure[at + 1 :]
    return RAW if figure.endswith("_raw") else row.get("weights", "ema")
