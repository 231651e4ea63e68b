"""How long characters are, against the definition: means of what narrower contexts leave."""

from collections import defaultdict

import numpy as np
import pytest

from torchtitan.models.dit_tts.text.character_lengths import fit_lengths

OFFSETS = [(), (0,), (0, 1), (-1, 0, 1), (-1, 0, 1, 2), (-2, -1, 0, 1, 2)]
STATES = [[0, 2, 3, 2, 3, 0], [0, 3, 2, 4, 0], [0, 1_114_113, 0], [0, 0]]
FRAMES = [[3, 1, 5, 2, 4, 6], [2, 7, 0, 3, 4], [1, 9, 0], [5, 5]]


def around(text: list[int], place: int, number: int) -> tuple[int, ...]:
    """What context `number` is of; an edge beyond the ends."""
    places = [place + offset for offset in OFFSETS[number]]
    return number, *(text[p] if 0 <= p < len(text) else 0 for p in places)


def by_definition(texts, frames) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    left = [[float(each) for each in row] for row in frames]
    for number in range(len(OFFSETS)):
        seen = defaultdict(list)
        for text, row in zip(texts, left, strict=True):
            for place, value in enumerate(row):
                seen[around(text, place, number)].append(value)
        # A context is believed as if eight examples more had said nothing, except for the mean of all.
        found |= {key: sum(v) / (len(v) + 8 * (number > 0)) for key, v in seen.items()}
        left = [
            [value - found[around(text, place, number)] for place, value in enumerate(row)]
            for text, row in zip(texts, left, strict=True)
        ]
    return found


@pytest.mark.parametrize("text", [*STATES, [0, 2, 4, 3, 2, 0], [0, 77, 78, 0], [5], [3, 2]])
def test_known_and_unknown_contexts(text):
    """Those that were never seen add nothing, and a character that was never seen has the mean of all."""
    table = by_definition(STATES, FRAMES)
    wanted = [
        sum(table.get(around(text, place, number), 0.0) for number in range(len(OFFSETS)))
        for place in range(len(text))
    ]
    lengths = fit_lengths(list(map(np.array, STATES)), list(map(np.array, FRAMES)))
    assert (np.diff(lengths.keys.astype(object)) > 0).all() and len(lengths.keys) == len(table)
    np.testing.assert_allclose(lengths.expected(np.array(text)), wanted, rtol=1e-5, atol=1e-6)
