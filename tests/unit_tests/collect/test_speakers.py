"""Changes of speaker by an encoder that is known, and clusters against a plain definition."""

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from tests.helpers.sentences import refused
from titan_tts.collect import speakers
from titan_tts.collect.speakers import cluster, embed, speaker_changes
from titan_tts.collect.speech_regions import frame_power

RATE = 16_000


class Pitch:
    """Voices are tones: one axis for each of three bands."""

    name = "pitch"

    def embed(self, sounds):
        vectors = []
        for sound in sounds:
            spectrum = np.abs(np.fft.rfft(sound.waveform.numpy(), 2 * RATE))
            bands = np.array([spectrum[a : a + 400].sum() for a in (200, 1000, 1800)])
            vectors.append(bands / np.linalg.norm(bands))
        return np.stack(vectors).astype(np.float32)


def spoken(*turns):
    """(waveform, power, regions) of turns (Hz, or 0 for a pause, and ms)."""
    parts, regions, now = [], [], 0
    for hertz, length in turns:
        time = np.arange(length * RATE // 1000) / RATE
        parts.append(np.sin(2 * np.pi * hertz * time))
        if hertz:
            regions.append((now, now + length))
        now += length
    waveform = np.concatenate(parts).astype(np.float32)
    merged = [list(regions[0])]
    for start, stop in regions[1:]:
        if start == merged[-1][1]:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    return waveform, frame_power(waveform), np.array(merged)


def changes(*turns, pause=500):
    told = []
    found = speaker_changes(
        *spoken(*turns), Pitch(), 0.8, pause, lambda stage, seconds: told.append((stage, seconds))
    )
    assert {stage for stage, _ in told} == {"speakers"}
    return sorted(found)


def test_a_change_inside_speech_and_one_at_a_short_pause():
    (found,) = changes((200, 4000), (600, 4000))
    assert abs(found - 4000) <= 400
    assert changes((200, 4000), (0, 300), (600, 4000)) == [4150]
    near = changes((200, 4000), (600, 3000), (0, 200), (1000, 3000))
    assert len(near) == 2 and abs(near[0] - 4000) <= 400 and near[1] == 7100


def test_no_change_within_a_voice_nor_at_a_long_pause():
    """A long pause is cut anyway, and what is before it tells nothing about what is after it."""
    assert changes((200, 4000), (0, 300), (210, 4000)) == []
    assert changes((200, 4000), (0, 700), (600, 4000)) == []
    assert changes((200, 1000)) == changes((200, 700), (600, 700)) == []
    empty = np.zeros((0, 2), np.int64)
    assert speaker_changes(np.zeros(9), np.zeros(0), empty, Pitch(), 0.8, 500, print) == []


def test_the_surest_change_is_the_first():
    class Sure(Pitch):
        def embed(self, sounds):
            loud = [float(sound.waveform.mean()) for sound in sounds]
            return np.array([[np.cos(a), np.sin(a)] for a in loud], np.float32)

    levels = np.repeat([0.0, 1.2, 0.2], 4 * RATE).astype(np.float32)
    levels[4 * RATE :] += 0.3  # angles 0, 1.5 and 0.5: the first change is the larger one
    found = speaker_changes(
        levels, frame_power(levels), np.array([[0, 12_000]]), Sure(), 0.95, 500, lambda *a: None
    )
    assert len(found) == 2 and found[0] < found[1]
    levels = levels[::-1].copy()
    found = speaker_changes(
        levels, frame_power(levels), np.array([[0, 12_000]]), Sure(), 0.95, 500, lambda *a: None
    )
    assert len(found) == 2 and found[0] > found[1]


def voices(seed, files=3, each=40, size=16):
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((5, size))
    who = draw.integers(0, 5, files * each)
    vectors = centres[who] + 0.3 * draw.standard_normal((len(who), size))
    return vectors.astype(np.float32), np.repeat(np.arange(files), each), who


def same_partition(a, b):
    return len({*zip(a, b)}) == len({*a}) == len({*b})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", (0.3, 0.6, 0.85))
def test_one_file_is_average_linkage(seed, threshold, monkeypatch):
    monkeypatch.setattr(speakers, "_ROWS", 7)
    vectors, _, _ = voices(seed)
    labels, similarity = cluster(vectors, np.zeros(len(vectors), int), threshold)
    wanted = fcluster(linkage(vectors, "average", "cosine"), 1 - threshold, "distance")
    assert same_partition(labels.tolist(), wanted.tolist())
    sizes = np.bincount(labels)[1:]
    assert (np.diff(sizes) <= 0).all() and len(sizes) == labels.max()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row, label in enumerate(labels):
        mean = unit[labels == label].mean(axis=0)
        assert similarity[row] == pytest.approx(unit[row] @ mean / np.linalg.norm(mean), abs=1e-5)


def test_clusters_of_files_are_joined_by_the_average_over_segments():
    vectors, files, who = voices(1)
    labels, _ = cluster(vectors, files, 0.6)
    assert same_partition(labels.tolist(), who.tolist())
    again, _ = cluster(vectors, files[::-1].copy(), 0.6)
    assert same_partition(again.tolist(), who.tolist())
    # Three segments of one file and one of another make a cluster, to which the third file's has 0.64 on average over
    # its four segments, and 0.53 over the mean of each file.
    angles = np.radians([0, 0, 0, 40, -45])
    few = np.stack([np.cos(angles), np.sin(angles)], 1)
    labels, _ = cluster(few, np.array([0, 0, 0, 1, 2]), 0.5)
    assert (
        np.mean(np.cos(np.radians([45, 45, 45, 85]))) > 0.55 > np.mean(np.cos(np.radians([45, 85])))
    )
    assert cluster(few, np.array([0, 0, 0, 1, 2]), 0.55)[0].tolist() == labels.tolist() == [1] * 5
    assert cluster(few, np.array([0, 0, 0, 1, 2]), 0.6)[0].tolist() == [1, 1, 1, 1, 2]


def test_labels_stay_when_files_are_added():
    vectors, files, who = voices(2)
    first = files < 2
    before, _ = cluster(vectors[first], files[first], 0.6)
    previous = np.zeros(len(vectors), np.int64)
    previous[first] = 10 * before  # names with gaps
    after, _ = cluster(vectors, files, 0.6, previous)
    assert (after[first] == previous[first]).all()
    voice = -vectors[who == 0].mean(axis=0)
    more = np.concatenate([vectors, [voice] * 7])
    labels, _ = cluster(more, np.r_[files, [3] * 7], 0.6, np.r_[after, [0] * 7])
    assert labels.tolist() == [*after.tolist(), *[after.max() + 1] * 7]


def test_silence_stays_alone_and_nothing_has_no_cluster():
    labels, similarity = cluster(
        np.array([[1.0, 0], [0, 0], [0, 0], [1, 0]]), np.zeros(4, int), 0.8
    )
    assert labels[0] == labels[3] == 1 and len(set(labels.tolist())) == 3
    assert similarity.tolist() == [1, 0, 0, 1]
    labels, similarity = cluster(np.zeros((0, 8)), np.zeros(0, int), 0.8)
    assert len(labels) == len(similarity) == 0


def test_an_encoder_that_returns_too_few_is_refused():
    class Short:
        name = "short"

        def embed(self, sounds):
            return np.zeros((len(sounds) - 1, 4))

    refused(
        lambda: embed(Short(), np.zeros(9000), [(0, 100), (100, 200)]),
        "'short' returned an array (1, 4) for 2 sounds",
    )
