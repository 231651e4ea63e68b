"""Where recordings are cut: what holds of any recording, and places that are known by hand."""

import numpy as np
import pytest

from titan_tts.collect.segments import PADDING, Limits, cut

LIMITS = Limits(shortest=1000, longest=10_000, pause=500)


def cut_quiet(regions, duration, changes=(), limits=LIMITS, power=None):
    power = np.ones(duration // 10) if power is None else power
    return cut(np.array(regions, np.int64).reshape(-1, 2), duration, changes, power, limits)


def drawn(seed):
    """(regions, duration, changes, power, limits)"""
    draw = np.random.default_rng(seed)
    scale = 10 ** draw.uniform(1.5, 4, draw.integers(1, 60))
    lengths = np.maximum(32, draw.exponential(scale)).astype(int)
    pauses = 128 + draw.exponential(10 ** draw.uniform(1, 3.5, len(lengths))).astype(int)
    pauses[0] *= draw.integers(0, 2)
    edges = np.cumsum(np.stack([pauses, lengths], 1).reshape(-1))
    regions = edges.reshape(-1, 2)
    duration = int(edges[-1] + draw.integers(0, 2) * draw.integers(0, 3000))
    inside = draw.integers(0, duration, draw.integers(0, 9))
    changes = [int(t) for t in inside if any(a < t < b for a, b in regions)]
    shortest = int(draw.integers(200, 3000))
    limits = Limits(shortest, shortest * int(draw.integers(2, 12)), int(draw.integers(150, 900)))
    return regions, duration, changes, draw.random(duration // 10 + 1), limits


@pytest.mark.parametrize("some", range(8))
def test_of_any_recording(some):
    for seed in range(100 * some, 100 * some + 100):
        regions, duration, changes, power, limits = drawn(seed)
        found = cut(regions, duration, changes, power, limits)
        if duration < limits.shortest:
            assert found == []
            continue
        assert found == sorted(found)
        assert all(stop <= start for (_, stop), (start, _) in zip(found, found[1:]))
        assert all(limits.shortest <= b - a <= limits.longest for a, b in found), seed
        assert 0 <= found[0][0] and found[-1][1] <= duration
        spoken, kept = np.zeros(duration, bool), np.zeros(duration, bool)
        for start, stop in regions:
            spoken[start:stop] = True
        for start, stop in found:
            kept[start:stop] = True
            assert spoken[start:stop].any()
        assert not (spoken & ~kept).any(), seed


LONGER = Limits(2000, 10_000, 500)


@pytest.mark.parametrize(
    ("regions", "duration", "changes", "limits", "wanted"),
    [
        # At pauses, with a little silence on both sides; no padding where the pause is shorter than it.
        (
            [(1000, 3000), (3300, 5000), (5600, 8000), (12_000, 14_000)],
            *(20_000, [], LIMITS),
            [(940, 5060), (5540, 8060), (11_940, 14_060)],
        ),
        ([(1000, 3000), (3080, 5000)], 6000, [3040], LIMITS, [(940, 3040), (3040, 5060)]),
        # The longest pause where both cannot be cut: 3000 and 4200 are less than two seconds apart.
        ([(0, 2500), (3500, 3700), (4700, 8000)], 8000, [], LONGER, [(0, 2560), (3440, 8000)]),
        ([(0, 2500), (3500, 3700), (4701, 8000)], 8000, [], LONGER, [(0, 3760), (4641, 8000)]),
        # A word in silence is filled up.
        ([(5000, 5200)], 10_000, [], LIMITS, [(4600, 5600)]),
        ([(100, 300)], 10_000, [], LIMITS, [(0, 1000)]),
        ([(9800, 10_000)], 10_000, [], LIMITS, [(9000, 10_000)]),
        ([(0, 900)], 900, [], LIMITS, []),
        ([], 10_000, [], LIMITS, []),
        # What is asked for goes before the 3 s that a segment should have.
        (
            [(k * 2500, k * 2500 + 1900) for k in range(3)],
            *(7500, [], Limits(500, 4000, 500)),
            [(0, 1960), (2440, 4460), (4940, 6960)],
        ),
        # Changes of speaker are cut before pauses: 3.3 s and the second change are too near to the first one.
        ([(0, 6000)], 6000, [2500], LIMITS, [(0, 2500), (2500, 6000)]),
        ([(0, 3000), (3600, 6000)], 6000, [2500, 2000], LIMITS, [(0, 2500), (2500, 6000)]),
    ],
)
def test_by_hand(regions, duration, changes, limits, wanted):
    assert PADDING == 60
    assert cut_quiet(regions, duration, changes, limits) == wanted


@pytest.mark.parametrize(
    ("phrases", "pause", "wanted"),
    [
        ([2000, 2000, 2000, 2000], 600, [4600, 4600]),  # 2.6 s each would be too short
        ([2000, 2000, 2000, 2000], 400, [9200]),  # no pause of half a second
        ([2000] * 4, 1000, [2000] * 4),  # such a pause always ends a segment
        ([4000, 1000, 4000], 600, [5600, 4000]),  # a short one goes to a neighbour
        ([5000] * 3, 200, [5000, 10_200]),  # over 12 s shorter pauses are cut, too
    ],
)
def test_segments_have_3_to_12_seconds_where_the_pauses_allow_it(phrases, pause, wanted):
    limits = Limits(shortest=1000, longest=30_000, pause=500)
    edges = np.cumsum([pause, *(x for phrase in phrases for x in (phrase, pause))])
    found = cut_quiet(edges[:-1].reshape(-1, 2), int(edges[-1]), limits=limits)
    lengths = [stop - start - 2 * PADDING for start, stop in found]
    assert sorted(lengths) == sorted(wanted)


def test_what_is_too_long_is_cut_at_a_short_pause_or_the_quietest_place():
    power = np.ones(1400)
    power[620:640] = 0.1  # 6.2 s
    power[100:120] = power[1100:1110] = 0.01  # too early, and too late
    ((_, first), (second, _)) = cut_quiet([(0, 14_000)], 14_000, power=power)
    assert first == second and 6200 <= first < 6400
    regions = [(0, 3000), (3200, 14_000)]
    assert [stop for _, stop in cut_quiet(regions, 14_000, power=power)][0] == 3000 + PADDING
    assert cut_quiet(regions, 14_000, power=power)[1][0] == 3200 - PADDING
