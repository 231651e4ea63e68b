"""How far texts agree: two recognizers' of one segment, and two annotators' over the segments that both judged."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from titan_tts.annotate.segments import Segment
from titan_tts.annotate.store import Edit


def differences(first: str, second: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Each text in runs of words, with whether a run differs from the other text; case and punctuation do not differ.

    Of texts without blanks, such as Chinese ones, every character is a word.
    """
    gap = " " if " " in first + second else ""
    a, b = (text.split() if gap else list(text) for text in (first, second))
    plain = [[re.sub(r"[^\w'’]", "", word).lower() for word in words] for words in (a, b)]
    runs: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for kind, *place in SequenceMatcher(None, plain[0], plain[1], autojunk=False).get_opcodes():
        for found, words in zip(runs, (a[slice(*place[:2])], b[slice(*place[2:])])):
            found += [(gap.join(words), kind != "equal")] if words else []
    return runs


def agreement(pairs: Sequence[tuple[Segment, Edit, Edit]]) -> str:
    """Of what `Assignments.pairs` returns, in words; empty without any. Words through the normalizer of `evaluate`."""
    from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

    if not pairs:
        return ""
    parts = [f"{len(pairs)} judged by two"]
    kappa = cohens_kappa([(first.action, second.action) for _, first, second in pairs])
    parts += [f"Cohen's kappa {kappa:.2f}"] if kappa is not None else []
    errors = [
        count_errors(first.text or "", second.text or "", segment.language)
        for segment, first, second in pairs
        if first.action == second.action == "accept"
    ]
    words, wrong = sum(each.words for each in errors), sum(each.word_errors for each in errors)
    parts += [f"{100 * wrong / words:.1f} % of words differ"] if words else []
    return ", ".join(parts)


def cohens_kappa(labels: Sequence[tuple[str, str]]) -> float | None:
    """(observed - expected) / (1 - expected) agreement of two raters (Cohen 1960); None where that is 0 / 0."""
    first, second = zip(*labels, strict=True)
    observed = sum(a == b for a, b in labels) / len(labels)
    expected = sum(first.count(x) * second.count(x) for x in set(first)) / len(labels) ** 2
    return None if expected == 1 else (observed - expected) / (1 - expected)
