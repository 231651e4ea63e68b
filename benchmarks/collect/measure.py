"""What `titan-tts collect` makes of long recordings whose truth is known: times, speakers, texts, figures.

    python -m benchmarks.collect.measure               # benchmarks/results/collect.json

Speaks two hours into outputs/collect, unless they are there, and takes 25 minutes of a core.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from rapidfuzz.distance import Levenshtein
from scipy.stats import spearmanr

from benchmarks.collect.recordings import RATE, Recording, Spoken, make
from benchmarks.sentences.corpus import ROOT
from titan_tts.collect.folder import read_recording
from titan_tts.collect.speakers import cluster
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors, normalizer

RESULTS = ROOT / "benchmarks/results/collect.json"
NEAR = 0.2  # s: so near a boundary is the true one
PAUSE = 0.5  # s, the command's default
FRAMES = 100  # per second
_WHOLE, _PART = 0.9, 0.1  # of a sentence: a segment has it, or a part of it
_ONE_VOICE = 0.9  # of a segment's speech


@dataclass(frozen=True)
class Judged:
    """A line of collection.jsonl beside the truth of its times."""

    row: dict[str, Any]
    recording: int
    embedding: np.ndarray
    whole: list[Spoken]
    cut: list[Spoken]  # sentences of which it has a part
    voices: Counter[str]  # seconds

    @property
    def text(self) -> str:
        return " ".join(each.text for each in self.whole)

    @property
    def one_voice(self) -> bool:
        return max(self.voices.values()) >= _ONE_VOICE * self.voices.total()


def judge(recording: Recording, number: int, row: dict[str, Any], vector: np.ndarray) -> Judged:
    voices: Counter[str] = Counter()
    whole, cut = [], []
    for sentence in recording.sentences:
        parts = np.clip(sentence.speech, row["start"], row["stop"])
        share = float((parts[:, 1] - parts[:, 0]).sum() / np.diff(sentence.speech).sum())
        if share > 0:
            voices[sentence.speaker] += share * float(np.diff(sentence.speech).sum())
        if share >= _PART:
            (whole if share >= _WHOLE else cut).append(sentence)
    return Judged(row, number, vector, whole, cut, voices)


def collect(recordings: Sequence[Recording], folder: Path) -> list[Judged]:
    """By the command, from files to collection.jsonl."""
    for old in (source := folder / "recordings", output := folder / "collected"):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir()
    for number, recording in enumerate(recordings):
        soundfile.write(source / f"{number}.flac", recording.samples, RATE)
    command = [sys.executable, "-m", "titan_tts", "collect", str(source), str(output)]
    command += ["--recognizer", "benchmarks.sentences.referee:words"]
    command += ["--verbatim-recognizer", "benchmarks.sentences.referee:second"]
    subprocess.run([*command, "--language", "en", "--workers", "1"], check=True, cwd=ROOT)
    vectors = {}
    for file in sorted((output / "files").iterdir()):
        records, embeddings = read_recording(file, file.name)
        ids = [record["id"] for record in records]
        vectors |= zip(ids, embeddings, strict=True)
    rows = map(json.loads, (output / "collection.jsonl").read_text().splitlines())
    numbered = [(int(Path(row["source"]).stem), row) for row in rows]
    return [judge(recordings[n], n, row, vectors[row["id"]]) for n, row in numbered]


def mask(spans: Sequence[tuple[float, float]], seconds: float) -> np.ndarray:
    frames = np.zeros(round(seconds * FRAMES) + 1, bool)
    for start, stop in spans:
        frames[round(start * FRAMES) : round(stop * FRAMES)] = True
    return frames


def speech_time(recordings: Sequence[Recording], judged: Sequence[Judged]) -> dict[str, float]:
    """The fraction of segments' time that is speech or a pause below half a second, and of speech that is found."""
    found, true, both, right = 0, 0, 0, 0
    for number, recording in enumerate(recordings):
        seconds = len(recording.samples) / RATE
        speech = mask([span for each in recording.sentences for span in each.speech], seconds)
        spans = [(j.row["start"], j.row["stop"]) for j in judged if j.recording == number]
        segments = mask(spans, seconds)
        filled = speech.copy()
        edges = np.flatnonzero(np.diff(np.concatenate([[1], speech.astype(int), [1]])))
        for start, stop in edges.reshape(-1, 2):
            filled[start:stop] |= stop - start < PAUSE * FRAMES
        found, true = found + int(segments.sum()), true + int(speech.sum())
        both, right = both + int((speech & segments).sum()), right + int((segments & filled).sum())
    return {"precision": right / found, "recall": both / true}


def boundaries(recordings: Sequence[Recording], judged: Sequence[Judged]) -> dict[str, Any]:
    """Precision: of segments' ends those within 0.2 s of an end of true speech. Recall [fraction, number] by kind: of
    the ends of sentences at pauses, and at changes of speaker without one, those within 0.2 s of a segment's end."""
    right: list[bool] = []
    met: defaultdict[str, list[bool]] = defaultdict(list)
    for number, recording in enumerate(recordings):
        rows = [j.row for j in judged if j.recording == number]
        ends = np.array([row[edge] for row in rows for edge in ("start", "stop")])
        sentences = recording.sentences
        true = np.array([t for each in sentences for span in each.speech for t in span])
        right += [bool(np.abs(true - end).min() < NEAR) for end in ends]
        for before, after in zip(sentences[:-1], sentences[1:], strict=True):
            gap = after.start - before.stop
            kind = "change without a pause" if before.speaker != after.speaker else ""
            for shortest, name in ((PAUSE, "pause"), (PAUSE + 0.1, "pause from 0.6 s")):
                kind = name if gap >= shortest else kind
            kind = "overlap" if gap < 0 else kind
            for end in (before.stop, after.start) if kind else ():
                met[kind].append(bool(np.abs(ends - end).min() < NEAR))
    recall = {kind: [float(np.mean(each)), len(each)] for kind, each in sorted(met.items())}
    return {"precision": float(np.mean(right)), "found": len(right), "recall": recall}


def speakers(judged: Sequence[Judged], labels: np.ndarray) -> dict[str, Any]:
    """Of segments of one speaker: pairs of segments, and clusters."""
    kept = np.array([bool(j.voices) and j.one_voice for j in judged])
    names = np.array([max(j.voices, key=j.voices.__getitem__, default="") for j in judged])[kept]
    _, rows = np.unique(labels[kept], return_inverse=True)
    voices, columns = np.unique(names, return_inverse=True)
    table = np.zeros((rows.max() + 1, len(voices)), int)
    np.add.at(table, (rows, columns), 1)  # segments of each cluster and voice
    same = _pairs(table)
    precision, recall = same / _pairs(table.sum(axis=1)), same / _pairs(table.sum(axis=0))
    return {
        "pairs": {"precision": precision, "recall": recall},
        "f1": 2 * precision * recall / (precision + recall),
        "purity": float(table.max(axis=1).sum() / table.sum()),
        "completeness": float(table.max(axis=0).sum() / table.sum()),
        "clusters": len(table),
        "of one segment": int((table.sum(axis=1) == 1).sum()),
        "speakers": len(voices),
        "together": sorted(" ".join(voices[row > 0]) for row in table if (row > 0).sum() > 1),
    }


def _pairs(counts: np.ndarray) -> float:
    return float((counts * (counts - 1)).sum() / 2)


def texts(judged: Sequence[Judged]) -> dict[str, Any]:
    """Word errors of segments of whole sentences, by label and against agreement; and texts on a wrong segment: of another
    segment's words they have two thirds, of their own not one. (In noise a text that has little of its own sentence
    is by chance nearer to one of a thousand others.)"""
    clear = [each for each in judged if each.whole and not each.cut]
    errors = [count_errors(j.text, j.row["text"], "en") for j in clear]
    verbatim = [count_errors(j.text, j.row["text_verbatim"], "en") for j in clear]
    labels = np.array([j.row["quality"] for j in clear])
    normalize = normalizer("en")
    true = [normalize(each.text).split() for each in clear]
    wrong = compared = readable = 0
    for number, each in enumerate(clear):
        for heard in filter(None, (each.row["text"], each.row["text_verbatim"])):
            said = normalize(heard).split()
            rates = [Levenshtein.distance(words, said) / len(words) for words in true]
            compared += 1
            readable += min(rates) <= 1 / 3
            wrong += min(rates) <= 1 / 3 and rates[number] > 2 / 3
    return {
        "segments": len(clear),
        "compared": compared,
        "that have two thirds of some segment's words": readable,
        "on a wrong segment": wrong,
        "wer": _rate(errors),
        "wer of the verbatim text": _rate(verbatim),
        "wer, segments by label": {
            label: [_rate([e for e, its in zip(errors, labels) if its == label]), int(count)]
            for label, count in zip(*np.unique(labels, return_counts=True), strict=True)
        },
        "rank correlation of agreement and errors": float(
            spearmanr([j.row["agreement"] for j in clear], [_rate([e]) for e in errors]).statistic
        ),
    }


def _rate(errors: Sequence[Any]) -> float:
    return sum(e.word_errors for e in errors) / sum(e.words for e in errors)


def snr_error(recordings: Sequence[Recording], judged: Sequence[Judged]) -> dict[str, float]:
    """Against the true one up to 8 kHz, where the command measures: so much of white noise's power lies there."""
    error = []
    for each in judged:
        if each.whole and not each.cut:
            noise = recordings[each.recording].noise * 8000 / (RATE / 2)
            level = np.mean([sentence.level for sentence in each.whole])
            error.append(abs(10 * np.log10(level / noise) - each.row["snr_db"]))
    return {"median": float(np.median(error)), "95 %": float(np.percentile(error, 95))}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/collect")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    recordings = list(make(options.hours, options.seed, options.folder / "sentences"))
    start = time.monotonic()
    judged = collect(recordings, options.folder)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = sum(len(each.samples) for each in recordings) / RATE
    vectors, files, lengths = (
        np.stack([j.embedding for j in judged]),
        np.array([j.recording for j in judged]),
        np.array([j.row["stop"] - j.row["start"] for j in judged]),
    )
    report = {
        "recordings": len(recordings),
        "hours": seconds / 3600,
        "sentences": sum(len(each.sentences) for each in recordings),
        "segments": len(judged),
        "without speech, with a text": [
            sum(not j.voices for j in judged),
            sum(not j.voices and bool(j.row["text"]) for j in judged),
        ],
        "of several speakers": sum(bool(j.voices) and not j.one_voice for j in judged),
        "that cut a sentence": sum(bool(j.cut) for j in judged),
        "speech time": speech_time(recordings, judged),
        "boundaries": boundaries(recordings, judged),
        "speakers": speakers(judged, np.array([int(j.row["speaker"][1:]) for j in judged])),
        "speakers by threshold": {
            threshold: speakers(judged, cluster(vectors, files, lengths, threshold)[0])
            for threshold in (0.75, 0.8, 0.85)
        },
        "texts": texts(judged),
        "snr error, dB": snr_error(recordings, judged),
        "core seconds per hour": (used.ru_utime + used.ru_stime) / seconds * 3600,
        "wall seconds": time.monotonic() - start,
        "peak memory, MB": used.ru_maxrss / 1e3,
    }
    content = {"seed": options.seed, **report, "conditions": environment()}
    write_atomic(options.out, json.dumps(content, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(report["texts"]["on a wrong segment"] > 0)


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
