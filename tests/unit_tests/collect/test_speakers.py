"""Changes of speaker by an encoder that is known, and clusters against a plain definition."""

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from tests.helpers.sentences import refused
from titan_tts.collect import speakers
from titan_tts.collect.segments import frame_power
from titan_tts.collect.speakers import cluster, embed, speaker_changes

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
    return sorted(speaker_changes(*spoken(*turns), Pitch(), 0.8, pause))


def test_changes_of_speaker():
    (found,) = changes((200, 4000), (600, 4000))
    assert abs(found - 4000) <= 400
    assert changes((200, 4000), (0, 300), (600, 4000)) == [4150]
    near = changes((200, 4000), (600, 3000), (0, 200), (1000, 3000))
    assert len(near) == 2 and abs(near[0] - 4000) <= 400 and near[1] == 7100
    assert changes((200, 4000), (0, 300), (210, 4000)) == []
    assert changes((200, 4000), (0, 700), (600, 4000)) == []  # a long pause is cut anyway
    assert changes((200, 1000)) == changes((200, 700), (600, 700)) == []
    empty = np.zeros((0, 2), np.int64)
    assert speaker_changes(np.zeros(9), np.zeros(0), empty, Pitch(), 0.8, 500) == []


def test_the_surest_change_is_the_first():
    class Sure(Pitch):
        def embed(self, sounds):
            loud = [float(sound.waveform.mean()) for sound in sounds]
            return np.array([[np.cos(a), np.sin(a)] for a in loud], np.float32)

    levels = np.repeat([0.0, 1.2, 0.2], 4 * RATE).astype(np.float32)
    levels[4 * RATE :] += 0.3  # angles 0, 1.5 and 0.5: the first change is the larger one
    for each, is_first in ((levels, True), (levels[::-1].copy(), False)):
        given = each, frame_power(each), np.array([[0, 12_000]]), Sure(), 0.95, 500
        one, other = speaker_changes(*given)
        assert (one < other) == is_first


def voices(seed, files=3, each=40, size=16):
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((5, size))
    who = draw.integers(0, 5, files * each)
    vectors = centres[who] + 0.3 * draw.standard_normal((len(who), size))
    return vectors.astype(np.float32), np.repeat(np.arange(files), each), who


def clusters(vectors, files, threshold, seconds=None, previous=None):
    seconds = np.full(len(vectors), 3.0) if seconds is None else np.array(seconds)
    previous = np.zeros(len(vectors), np.int64) if previous is None else previous
    return cluster(np.array(vectors), np.array(files), seconds, threshold, previous)


def same_partition(a, b):
    return len({*zip(a, b)}) == len({*a}) == len({*b})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threshold", (0.3, 0.6, 0.85))
def test_one_file_is_average_linkage(seed, threshold, monkeypatch):
    """Linked parts are clustered for themselves; the whole at once is the same."""
    monkeypatch.setattr(speakers, "_ROWS", 7)
    vectors, _, _ = voices(seed)
    labels = clusters(vectors, np.zeros(len(vectors), int), threshold)
    wanted = fcluster(linkage(vectors, "average", "cosine"), 1 - threshold, "distance")
    assert same_partition(labels.tolist(), wanted.tolist())
    sizes = np.bincount(labels)[1:]
    assert (np.diff(sizes) <= 0).all() and len(sizes) == labels.max()


@pytest.mark.parametrize("most", (7, 20))
def test_many_recordings_in_blocks_have_the_voices_that_they_have_at_once(most, monkeypatch):
    vectors, _, who = voices(3)
    monkeypatch.setattr(speakers, "_MOST", most)
    labels = clusters(vectors, np.arange(len(vectors)), 0.6)
    assert same_partition(labels.tolist(), who.tolist())
    alone = np.eye(30)  # nobody is like another: blocks leave as many
    assert len({*clusters(alone, np.arange(30), 0.6).tolist()}) == 30


def test_clusters_of_files_are_joined():
    vectors, files, who = voices(1)
    for each in (files, files[::-1].copy()):
        assert same_partition(clusters(vectors, each, 0.6).tolist(), who.tolist())
    # Two of one file at 0 and 40 degrees, whose mean is 0.53 like the one of another file at 75 degrees.
    angles = np.radians([0, 40, 75])
    few = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert clusters(few, [0, 0, 1], 0.5).tolist() == [1, 1, 1]
    assert clusters(few, [0, 0, 1], 0.56).tolist() == [1, 1, 2]
    assert clusters(few, [0, 1, 1], 0.56).tolist() == [2, 1, 1]


def test_short_segments_join_the_long_ones_of_their_file_and_make_no_speakers_of_their_own():
    """Each short one is 0.78 to 0.84 like its own file's voice and hardly like the other short ones."""
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((60, 64))
    noise[:, :2] = 0
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    who = np.arange(60) % 2
    share = np.where(np.arange(60) < 8, 0.97, draw.uniform(0.78, 0.84, 60))
    vectors = share[:, None] * np.eye(64)[who] + np.sqrt(1 - share**2)[:, None] * noise
    seconds = np.where(np.arange(60) < 8, 4.0, 1.2)
    files = np.arange(60) // 2 % 2
    labels = clusters(vectors, files, 0.85, seconds)
    assert same_partition(labels.tolist(), who.tolist())
    # What is less like them than that is another voice, and two such of a file are compared.
    other = np.concatenate([vectors, np.eye(64)[[2, 2]]])
    labels = clusters(other, np.r_[files, 0, 0], 0.85, np.r_[seconds, 1.0, 1.0])
    assert labels.max() == 3 and labels[-1] == labels[-2] == 3


def test_labels_stay_when_files_are_added():
    vectors, files, who = voices(2)
    first = files < 2
    before = clusters(vectors[first], files[first], 0.6)
    previous = np.zeros(len(vectors), np.int64)
    previous[first] = 10 * before  # names with gaps
    after = clusters(vectors, files, 0.6, previous=previous)
    assert (after[first] == previous[first]).all()
    voice = -vectors[who == 0].mean(axis=0)
    more = np.concatenate([vectors, [voice] * 7])
    labels = clusters(more, np.r_[files, [3] * 7], 0.6, previous=np.r_[after, [0] * 7])
    assert labels.tolist() == [*after.tolist(), *[after.max() + 1] * 7]


def test_silence_stays_alone_and_nothing_has_no_cluster():
    labels = clusters([[1.0, 0], [0, 0], [0, 0], [1, 0]], [0] * 4, 0.8, [5, 5, 1, 1])
    assert labels[0] == labels[3] == 1 and len(set(labels.tolist())) == 3
    assert len(clusters(np.zeros((0, 8)), [], 0.8)) == 0


def test_an_encoder_that_returns_too_few_is_refused():
    class Short:
        name = "short"

        def embed(self, sounds):
            return np.zeros((len(sounds) - 1, 4))

    refused(
        lambda: embed(Short(), np.zeros(9000), [(0, 100), (100, 200)]),
        "'short' returned an array (1, 4) for 2 sounds",
    )
