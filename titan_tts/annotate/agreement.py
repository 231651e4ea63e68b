"""How far two annotators agree, over the segments that both judged."""

from collections.abc import Sequence
from typing import NamedTuple

from titan_tts.annotate.segments import Segment
from titan_tts.annotate.store import Edit


class Agreement(NamedTuple):
    segments: int
    """that two people judged"""

    kappa: float | None
    """Cohen's (1960), of accept and reject; None where chance alone agrees always, as if both accept everything"""

    word_error_rate: float | None
    """between the texts that both accepted, through the normalizer of `evaluate`; None without a word"""

    def __str__(self) -> str:
        if not self.segments:
            return ""
        kappa, rate = self.kappa, self.word_error_rate
        parts = [f"{self.segments} judged by two"]
        parts += [f"Cohen's kappa {kappa:.2f}"] if kappa is not None else []
        parts += [f"{100 * rate:.1f} % of words differ"] if rate is not None else []
        return ", ".join(parts)


def agreement(pairs: Sequence[tuple[Segment, Edit, Edit]]) -> Agreement:
    """Of what `Assignments.pairs` returns."""
    from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

    errors = [
        count_errors(first.text or "", second.text or "", segment.language)
        for segment, first, second in pairs
        if first.action == second.action == "accept"
    ]
    words, wrong = sum(each.words for each in errors), sum(each.word_errors for each in errors)
    kappa = cohens_kappa([(first.action, second.action) for _, first, second in pairs])
    return Agreement(len(pairs), kappa, wrong / words if words else None)


def cohens_kappa(labels: Sequence[tuple[str, str]]) -> float | None:
    """(observed - expected) / (1 - expected) agreement of two raters' labels; None where that is 0 / 0."""
    if not labels:
        return None
    first, second = zip(*labels, strict=True)
    observed = sum(a == b for a, b in labels) / len(labels)
    expected = sum(first.count(x) * second.count(x) for x in set(first)) / len(labels) ** 2
    return None if expected == 1 else (observed - expected) / (1 - expected)
