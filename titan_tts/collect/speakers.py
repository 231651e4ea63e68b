"""Speaker diarization: changes of speaker within a recording, clusters of segments within and across recordings."""

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import csr_matrix, vstack
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform

from titan_tts.collect.segments import RATE, Span, quietest
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.speech.scoring.interface import Sound, SpeakerEncoder

WINDOW = 1600  # ms of speech that are compared on both sides of a place
SHORTEST_WINDOW = 800
STEP = 400
# Short windows of the same speaker are less similar, so the threshold is lower for them. A cut inside speech must be
# surer than one at a pause.
PAUSE_MARGIN, SPEECH_MARGIN, WINDOW_MARGIN = 0.10, 0.13, 0.30
LONG_SECONDS = 3.0  # from here on a segment's embedding tells voices apart
SHORT_MARGIN = 0.10  # that a shorter one may be less like its speaker
_BATCH = 256  # sounds at once
_ROWS = 1024  # segments that are compared with all others at once
_MOST = 4096  # clusters that are joined at once, with the distances of all pairs in memory


def speaker_changes(
    waveform: np.ndarray,
    power: np.ndarray,
    regions: np.ndarray,
    encoder: SpeakerEncoder,
    threshold: float,
    longest_pause: int,
) -> list[int]:
    """Times (ms) at which another speaker goes on after a pause shorter than `longest_pause` (ms) or none, the surest
    first. The speech before a place and after it, pauses left out, are compared: at every short pause and every 0.4 s
    of speech. Changes less than 0.8 s apart are not told apart.

    Args:
        waveform: (m,) at 16 kHz, with `power` (frames,) of 10 ms each.
        regions: (n, 2) speech, in ms.
        threshold: cosine above which two segments have one speaker.
    """
    if not len(regions):
        return []
    breaks = np.flatnonzero(regions[1:, 0] - regions[:-1, 1] >= longest_pause) + 1
    found = []
    for stretch in np.split(regions, breaks):
        found += _changes_of_stretch(waveform, power, stretch, encoder, threshold)
    return [time for _, time in sorted(found)]


def _changes_of_stretch(
    waveform: np.ndarray,
    power: np.ndarray,
    regions: np.ndarray,
    encoder: SpeakerEncoder,
    threshold: float,
) -> list[tuple[float, int]]:
    """(score, time) of each change; the lower the score, the surer. Places are in ms of speech, without the pauses."""
    ends = np.cumsum(regions[:, 1] - regions[:, 0])
    total = int(ends[-1])
    speech = np.concatenate([part_of(waveform, region) for region in regions.tolist()])
    middles = (regions[:-1, 1] + regions[1:, 0]) // 2
    pauses = dict(zip(ends[:-1].tolist(), middles.tolist(), strict=True))
    last = total - SHORTEST_WINDOW
    places = sorted(p for p in {*range(0, total, STEP), *pauses} if SHORTEST_WINDOW <= p <= last)
    before = {place: (max(0, place - WINDOW), place) for place in places}
    after = {place: (place, min(total, place + WINDOW)) for place in places}
    vectors = embed(encoder, speech, sorted({*before.values(), *after.values()}))
    scores = {}
    for place in places:
        shorter = min(place, total - place, WINDOW)
        margin = PAUSE_MARGIN if place in pauses else SPEECH_MARGIN
        bound = threshold - margin - WINDOW_MARGIN * (1 - shorter / WINDOW)
        scores[place] = float(vectors[before[place]] @ vectors[after[place]]) - bound
    found = []
    for place, score in scores.items():
        near = (each for each in places if abs(each - place) < SHORTEST_WINDOW)
        # Around a change all places look like one: the windows of its neighbours have some of both speakers.
        if score < 0 and place == min(near, key=lambda each: scores[each]):
            time = pauses.get(place)
            if time is None:
                region = int(np.searchsorted(ends, place))
                begin, end = regions[region].tolist()
                here = end - int(ends[region]) + place
                time = quietest(power, max(here - STEP // 2, begin), min(here + STEP // 2, end))
            found.append((score, time))
    return found


def part_of(waveform: np.ndarray, span: Span) -> np.ndarray:
    """The samples, at 16 kHz, of a span."""
    return waveform[span[0] * RATE // 1000 : span[1] * RATE // 1000]


def sound_of(waveform: np.ndarray, span: Span) -> Sound:
    return Sound(torch.from_numpy(part_of(waveform, span)), RATE)


def embed(
    encoder: SpeakerEncoder, waveform: np.ndarray, spans: list[Span]
) -> dict[Span, np.ndarray]:
    """{span: (E,) float32} of a waveform at 16 kHz, whatever the encoder is."""
    found: dict[Span, np.ndarray] = {}
    for start in range(0, len(spans), _BATCH):
        some = spans[start : start + _BATCH]
        vectors = np.asarray(encoder.embed([sound_of(waveform, span) for span in some]), np.float32)
        require(
            vectors.ndim == 2 and len(vectors) == len(some) and bool(np.isfinite(vectors).all()),
            f"the speaker encoder '{encoder.name}' returned an array {vectors.shape} for {len(some)} sounds; it must "
            "return finite numbers, (sounds, size)",
        )
        found |= zip(some, vectors, strict=True)
    return found


def cluster(
    embeddings: np.ndarray,
    files: np.ndarray,
    seconds: np.ndarray,
    threshold: float,
    previous: np.ndarray,
    highest: int = 0,
) -> np.ndarray:
    """Cluster segments by speaker: labels (n,) int64 from 1.

    Two clusters become one while the average cosine of their pairs is at least `threshold`, the most alike first: the
    segments of each file, then the means of these clusters over all files. This is done with the segments from
    `LONG_SECONDS` on. A shorter one, whose embedding tells less, goes to the cluster of its file with the nearest
    mean, if the cosine is at least `threshold - SHORT_MARGIN`; those left over are clustered alike by that.
    Labels go from the largest cluster to the smallest, unless `previous` has a segment's earlier label: a cluster takes
    the one that most of its segments had, and new clusters take the next numbers.

    Args:
        embeddings: (n, E), of any length but zero where there is a voice.
        files: (n,) number of each segment's file.
        seconds: (n,) length of each segment.
        previous: (n,) labels of an earlier call, 0 for new segments.
        highest: label up to which others may be in use for segments that are not here now.
    """
    if not len(embeddings):
        return np.zeros(0, np.int64)
    unit, groups = _unit(embeddings), np.full(len(embeddings), -1)
    is_long, lower = seconds >= LONG_SECONDS, max(threshold - SHORT_MARGIN, 0.01)
    if is_long.any():
        groups[is_long] = _clusters(unit[is_long], files[is_long], threshold)
        voices = _unit(_means(unit[is_long], groups[is_long]))
        for inside in _members(files):
            short = inside[~is_long[inside]]
            near = np.unique(groups[inside[is_long[inside]]])
            if len(near) and len(short):
                cosines = unit[short] @ voices[near].T
                sure = cosines.max(axis=1) >= lower
                groups[short[sure]] = near[cosines[sure].argmax(axis=1)]
    if (left := groups < 0).any():
        groups[left] = groups.max() + 1 + _clusters(unit[left], files[left], lower)
    return _named(groups, previous, highest)


def _members(groups: np.ndarray) -> list[np.ndarray]:
    """The rows of each group."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def _means(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Mean of the rows (n, E) of each group, numbered from 0."""
    sums = np.zeros((groups.max() + 1, rows.shape[1]))
    np.add.at(sums, groups, rows)
    return sums / np.bincount(groups)[:, None]


def _clusters(unit: np.ndarray, files: np.ndarray, threshold: float) -> np.ndarray:
    """(n,) cluster, from 0, of unit vectors: within each file, then over all."""
    groups, count = np.zeros(len(unit), np.int64), 0
    for inside in _members(files):
        groups[inside] = count + _average_linkage(unit[inside], threshold)
        count = int(groups[inside].max()) + 1
    return _average_linkage(_means(unit, groups), threshold)[groups]


def _average_linkage(means: np.ndarray, threshold: float) -> np.ndarray:
    """(n,) cluster of each row, from 0. `means`: of unit vectors, so that the product of two means is the average
    cosine of all pairs between them. A row without a voice (zeros) stays alone.

    Of more rows than `_MOST` each so many are clustered first, then the means of these clusters, as long as that
    leaves fewer: a voice of 100,000 recordings would take their distances squared in time and memory.
    """
    groups, rows, before = np.arange(len(means)), means, 2 * len(means)
    while _MOST < len(rows) < 0.9 * before:
        blocks, count = list[np.ndarray](), 0
        for start in range(0, len(rows), _MOST):
            blocks.append(count + _linked(rows[start : start + _MOST], threshold))
            count = int(blocks[-1].max()) + 1
        groups = np.concatenate(blocks)[groups]
        rows, before = _means(means, groups), len(rows)
    return _linked(rows, threshold)[groups]


def _linked(means: np.ndarray, threshold: float) -> np.ndarray:
    """(n,) cluster of each row. The average of two averages is at most the larger: what no chain of pairs above the
    threshold links is never merged, and each linked part is clustered for itself, which bounds the memory."""
    rows = (means[start : start + _ROWS] for start in range(0, len(means), _ROWS))
    near = vstack([csr_matrix(some @ means.T >= threshold) for some in rows])
    labels, count = np.zeros(len(means), np.int64), 0
    for part in _members(connected_components(near, directed=False)[1]):
        labels[part] = count
        if len(part) > 1:
            distances = squareform(1 - means[part] @ means[part].T, checks=False)
            labels[part] += fcluster(linkage(distances, "average"), 1 - threshold, "distance") - 1
        count = int(labels[part].max()) + 1
    return labels


def _named(groups: np.ndarray, previous: np.ndarray, highest: int) -> np.ndarray:
    """(n,) labels from 1 of clusters; see `cluster`."""
    _, first, groups, sizes = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    names, taken = np.zeros(len(sizes), np.int64), set[int]()
    pairs, shared = np.unique(np.stack([groups, previous], 1), axis=0, return_counts=True)
    for number in np.lexsort((pairs[:, 1], -shared)):
        group, name = pairs[number].tolist()
        if name > 0 and not names[group] and name not in taken:
            names[group] = name
            taken.add(name)
    new = np.flatnonzero(names == 0)
    new = new[np.lexsort((first[new], -sizes[new]))]
    names[new] = max(highest, int(previous.max())) + 1 + np.arange(len(new))
    return names[groups]
