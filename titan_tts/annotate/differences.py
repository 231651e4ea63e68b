"""The differences between two recognizers' texts of one segment."""

import re
from difflib import SequenceMatcher


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
