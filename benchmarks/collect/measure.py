"""What `titan-tts collect` makes of long recordings whose truth is known: times, speakers, texts, figures.

    python -m benchmarks.collect.measure               # benchmarks/results/collect.json

Half an hour of flite and espeak-ng is spoken once into outputs/collect and takes 15 minutes of a core.
"""

import argparse
import json
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.collect.recordings import RATE, Recording, Spoken, make
from benchmarks.sentences.corpus import ROOT
from titan_tts.collect.analyze import Analyzer, Segment
from titan_tts.collect.settings import Settings
from titan_tts.collect.speakers import cluster
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

RESULTS = ROOT / "benchmarks/results/collect.json"
NEAR = 0.2  # s: so near a boundary is the true one
FRAMES = 100  # per second
_WHOLE = 0.9  # of a sentence inside a segment: the segment has it
_PART = 0.1  # less than this of it: the segment has it not
_ONE_VOICE = 0.9  # of a segment's speech: its speaker's


@dataclass(frozen=True)
class Judged:
    """A segment beside the truth of its times."""

    segment: Segment
    recording: int
    whole: list[Spoken]
    cut: list[Spoken]  # sentences of which it has a part
    speaker: str | None  # who speaks most; None: nobody does
    share: float  # the speaker's, of all speech in it
    snr_db: float | None  # true, up to 8 kHz

    @property
    def text(self) -> str:
        return " ".join(each.text for each in self.whole)


def inside(sentence: Spoken, segment: Segment) -> float:
    """Seconds of a sentence's speech in a segment."""
    return sum(
        max(0.0, min(stop, segment.stop) - max(start, segment.start))
        for start, stop in sentence.speech
    )


def judge(recording: Recording, number: int, segment: Segment) -> Judged:
    shares = {}
    for index, sentence in enumerate(recording.sentences):
        spoken = sum(stop - start for start, stop in sentence.speech)
        shares[index] = inside(sentence, segment) / spoken
    told = recording.sentences
    whole = [told[index] for index, share in shares.items() if share >= _WHOLE]
    cut = [told[index] for index, share in shares.items() if _PART <= share < _WHOLE]
    voices: Counter[str] = Counter()
    for sentence in told:
        voices[sentence.speaker] += inside(sentence, segment)
    speaker, seconds = voices.most_common(1)[0]
    snr = None
    if whole:
        # White noise of RATE / 2 has so much of its power up to 8 kHz; the voices have next to none above.
        noise = recording.noise * 8000 / (RATE / 2)
        snr = 10 * np.log10(np.mean([each.level for each in whole]) / noise)
    share = seconds / max(voices.total(), 1e-9)
    return Judged(segment, number, whole, cut, speaker if seconds else None, share, snr)


def mask(spans: Sequence[tuple[float, float]], seconds: float) -> np.ndarray:
    frames = np.zeros(round(seconds * FRAMES) + 1, bool)
    for start, stop in spans:
        frames[round(start * FRAMES) : round(stop * FRAMES)] = True
    return frames


def speech_time(recordings: Sequence[Recording], judged: Sequence[Judged]) -> dict[str, float]:
    """Of the frames in segments the fraction that is speech, or a pause below half a second; of speech, what is found."""
    found, true, both, lost = 0, 0, 0, 0
    for number, recording in enumerate(recordings):
        seconds = len(recording.samples) / RATE
        speech = mask([span for each in recording.sentences for span in each.speech], seconds)
        spans = [(j.segment.start, j.segment.stop) for j in judged if j.recording == number]
        segments = mask(spans, seconds)
        true += int(speech.sum())
        both += int((speech & segments).sum())
        silent = np.flatnonzero(np.diff(np.concatenate([[1], speech.astype(int), [1]])))
        filled = speech.copy()
        for start, stop in silent.reshape(-1, 2):
            if stop - start < FRAMES / 2:
                filled[start:stop] = True
        found += int(segments.sum())
        lost += int((segments & ~filled).sum())
    return {"precision": 1 - lost / found, "recall": both / true}


def boundaries(
    recordings: Sequence[Recording], judged: Sequence[Judged], pause: float
) -> dict[str, Any]:
    """Precision: segments' ends within 0.2 s of an end of true speech. Recall by kind: of the ends of sentences at
    pauses that must be cut, and of changes of speaker without such a pause, those within 0.2 s of a segment's end."""
    right, count = 0, 0
    met: defaultdict[str, list[bool]] = defaultdict(list)
    for number, recording in enumerate(recordings):
        ends = np.array(
            [t for j in judged if j.recording == number for t in (j.segment.start, j.segment.stop)]
        )
        told = recording.sentences
        true = np.array([t for each in told for span in each.speech for t in span])
        right += sum(bool(np.abs(true - end).min() < NEAR) for end in ends)
        count += len(ends)
        for before, after in zip(told[:-1], told[1:], strict=True):
            gap = after.start - before.stop
            kind = "change without a pause" if before.speaker != after.speaker else ""
            kind = "overlap" if gap < 0 else kind
            kind = "pause" if gap >= pause else kind
            if gap >= pause + 0.1:
                kind = "pause, 0.1 s longer"
            for end in (before.stop, after.start) if kind else ():
                met[kind].append(bool(np.abs(ends - end).min() < NEAR))
    recall = {kind: [float(np.mean(each)), len(each)] for kind, each in met.items()}
    return {"precision": right / count, "found": count, "recall and number": recall}


def speakers(judged: Sequence[Judged], threshold: float) -> dict[str, Any]:
    """Of segments in which one speaks most of the time: pairs of segments, and clusters."""
    vectors = np.stack([each.segment.embedding for each in judged])
    labels, _ = cluster(vectors, np.array([each.recording for each in judged]), threshold)
    pure = np.array([each.speaker is not None and each.share >= _ONE_VOICE for each in judged])
    names = np.array([each.speaker or "" for each in judged])[pure]
    labels = labels[pure]
    same, together = names[:, None] == names, labels[:, None] == labels
    upper = np.triu(np.ones_like(same), 1)
    hits = int((same & together & upper).sum())
    precision, recall = hits / int((together & upper).sum()), hits / int((same & upper).sum())
    by_label: defaultdict[int, Counter[str]] = defaultdict(Counter)
    by_name: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for label, name in zip(labels.tolist(), names.tolist(), strict=True):
        by_label[label][name] += 1
        by_name[name][label] += 1
    return {
        "threshold": threshold,
        "pairs": {
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall),
        },
        "purity": sum(max(each.values()) for each in by_label.values()) / len(labels),
        "completeness": sum(max(each.values()) for each in by_name.values()) / len(labels),
        "clusters": len(by_label),
        "clusters of one segment": sum(each.total() == 1 for each in by_label.values()),
        "speakers": len(by_name),
        "segments": len(labels),
        "segments of several speakers": sum(j.share < _ONE_VOICE for j in judged if j.speaker),
        "voices in a cluster": sorted(
            " ".join(sorted(each)) for each in by_label.values() if len(each) > 1
        ),
    }


def texts(judged: Sequence[Judged]) -> dict[str, Any]:
    """Word errors of segments of whole sentences, against agreement; and texts that fit another segment better."""
    clear = [each for each in judged if each.whole and not each.cut]
    out: dict[str, Any] = {
        "segments of whole sentences": len(clear),
        "segments that cut a sentence": sum(bool(each.cut) for each in judged),
        "segments without speech": sum(each.speaker is None for each in judged),
        "texts heard where nobody speaks": sum(
            each.speaker is None and bool(each.segment.text) for each in judged
        ),
    }
    rates: dict[str, list[float]] = {}
    for name in ("text", "text_verbatim"):
        errors = [count_errors(each.text, getattr(each.segment, name), "en") for each in clear]
        out[f"wer of {name}"] = sum(e.word_errors for e in errors) / sum(e.words for e in errors)
        rates[name] = [e.word_errors / e.words for e in errors]
    by_label: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for each in clear:
        error = count_errors(each.text, each.segment.text, "en")
        by_label[each.segment.quality].append((error.word_errors, error.words))
    out["wer by label and segments"] = {
        name: [sum(e for e, _ in some) / sum(w for _, w in some), len(some)]
        for name, some in sorted(by_label.items())
    }
    agreements = [each.segment.agreement for each in clear]
    out["rank correlation of agreement and errors"] = float(
        spearmanr(agreements, rates["text"]).statistic
    )
    out["texts on a wrong segment"] = wrong_segments(clear)
    return out


def wrong_segments(clear: Sequence[Judged]) -> dict[str, int]:
    """Of both texts of a segment: those with fewer errors against another segment's truth than against its own."""
    wrong = Counter({"compared": 0, "wrong": 0})
    for each in clear:
        others = {other.text for other in clear if other is not each} - {each.text}
        for heard in (each.segment.text, each.segment.text_verbatim):
            if heard:
                own = count_errors(each.text, heard, "en")
                best = min(
                    e.word_errors / e.words for e in (count_errors(o, heard, "en") for o in others)
                )
                wrong["compared"] += 1
                wrong["wrong"] += best < own.word_errors / own.words
    return dict(wrong)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/collect")
    parser.add_argument("--thresholds", nargs="+", type=float, default=[0.75, 0.8, 0.85])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    recordings = list(make(options.hours, options.seed, options.folder))
    settings = Settings(
        recognizer="benchmarks.sentences.referee:words",
        verbatim_recognizer="benchmarks.sentences.referee:second",
        language="en",
    )
    analyzer = Analyzer(settings)
    judged: list[Judged] = []
    took: Counter[str] = Counter()

    def watch(stage: str, seconds: float) -> None:
        took[stage] += (now := time.perf_counter()) - clock[0]
        clock[0] = now

    for number, recording in enumerate(recordings):
        clock = [time.perf_counter()]
        segments = analyzer.analyze(recording.samples[:, None], RATE, watch)
        judged += [judge(recording, number, each) for each in segments]
        print(f"recording {number}: {len(segments)} segments", flush=True)
    heard = sum(len(each.samples) for each in recordings) / RATE
    snr = [(j.segment.snr_db, j.snr_db) for j in judged if j.snr_db is not None]
    errors = np.abs(np.subtract(*np.array(snr).T))
    report = {
        "recordings": len(recordings),
        "seconds": heard,
        "sentences": sum(len(each.sentences) for each in recordings),
        "segments": len(judged),
        "speech time": speech_time(recordings, judged),
        "boundaries": boundaries(recordings, judged, settings.pause_seconds),
        "speakers": [speakers(judged, each) for each in options.thresholds],
        "texts": texts(judged),
        "snr": {
            "median error dB": float(np.median(errors)),
            "95 % below dB": float(np.percentile(errors, 95)),
        },
        "labels": Counter(each.segment.quality for each in judged),
        "seconds of a core per hour": {k: round(v / heard * 3600, 1) for k, v in took.items()},
        "peak memory MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    content = {"seed": options.seed, **report, "conditions": environment()}
    write_atomic(options.out, json.dumps(content, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["texts"]["texts on a wrong segment"]["wrong"] == 0 else 1


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
