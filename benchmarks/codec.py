"""Measures what a codec costs a voice: recordings, and their copies through each of --codecs.

    OMP_NUM_THREADS=1 python benchmarks/codec.py --recordings /usr/share/asterisk/sounds/en_US_f_Allison \
        --texts /usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz

DNSMOS, words wrong by Whisper, the voice's similarity to the recording, the pitch's error by SwiftF0, and the distance of
the spectra below and above 8 kHz. Writes benchmarks/results/codec_voice.json.
"""

import argparse
import gzip
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.common import RESULTS, write_report  # noqa: E402
from torchtitan.models.dit_tts.bounded import parse_json  # noqa: E402
from torchtitan.models.dit_tts.errors import InputError, report_input_errors  # noqa: E402
from torchtitan.models.dit_tts.speech.audio import decode, resample, to_mono  # noqa: E402
from torchtitan.models.dit_tts.speech.codec import build_codec  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.spectrogram import hann_window, stft  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.interface import Sound  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.pitch import PitchTracker  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.plugins import (  # noqa: E402
    open_opinion_predictor,
    open_recognizer,
    open_speaker_encoder,
)
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, UtteranceScore, score  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.statistics import (  # noqa: E402
    difference,
    mean_interval,
    rate_interval,
)

_RATE, _HOP = 24_000, 240  # of spectra


def read_texts(path: Path) -> dict[str, str]:
    """{recording's name without its ending: text} of lines "name: text", gzipped or not (remarks in [] are no texts), or
    of JSON lines with text and audio."""
    if path.suffix == ".jsonl":
        rows = [parse_json(line) for line in path.read_text().splitlines()]
        return {Path(row["audio"]).stem: row["text"] for row in rows}
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        pairs = [line.split(":", 1) for line in file if ":" in line and line[0] != ";"]
    return {name.strip(): text.strip() for name, text in pairs if "[" not in text}


def choose(folder: Path, texts: dict[str, str], count: int) -> list[tuple[Path, str]]:
    """The recordings with the longest texts of at most 24 words, in a random order."""
    found = {str(path.relative_to(folder).with_suffix("")): path for path in folder.rglob("*.*")}
    known = [name for name in texts if name in found and len(texts[name].split()) <= 24]
    longest = sorted(known, key=lambda name: (-len(texts[name].split()), name))[:count]
    if not longest:
        raise InputError(f"{folder} has none of the recordings that the texts name")
    order = np.random.default_rng(0).permutation(len(longest))
    return [(found[longest[n]], texts[longest[n]]) for n in order]


def pitch_of(sound: Sound, tracker: PitchTracker) -> tuple[np.ndarray, np.ndarray]:
    """Pitch in Hz and voicing of frames of 16 ms."""
    found = tracker.network.detect(sound.samples(16_000), 16_000, fmin=50.0, fmax=600.0)
    return found.pitch_hz, found.confidence >= 0.5


def pitch_errors(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Median error in cents of frames that are voiced in both, their percentage above 200 cents, and the percentage of
    all frames that are voiced in one only."""
    frames = min(len(one[0]), len(other[0]))
    (first, voiced), (second, voiced_too) = (
        [part[:frames] for part in each] for each in (one, other)
    )
    cents = np.abs(1200 * np.log2(second / first))[voiced & voiced_too]
    return {
        "pitch_cents": float(np.median(cents)) if len(cents) else float("nan"),
        "pitch_far_off": 100 * float(np.mean(cents > 200)) if len(cents) else float("nan"),
        "voicing_wrong": 100 * float(np.mean(voiced != voiced_too)),
    }


def spectral_distances(one: Sound, other: Sound) -> dict[str, float]:
    """Log-spectral distance in dB of a sound to a recording (one), below 8 kHz and from there to 11: root of the mean square
    over the frequencies that the recording has, mean of the frames. Below -80 dB all is alike."""
    both = [torch.from_numpy(each.samples(_RATE)) for each in (one, other)]
    samples, window = min(map(len, both)) // _HOP * _HOP, hann_window(4 * _HOP)
    amplitudes = [stft(each[:samples], window, _HOP).abs() * 2 / window.sum() for each in both]
    first, second = (20 * (each + 1e-4).log10() for each in amplitudes)
    top = min(11_000, 0.45 * one.sample_rate)  # the rest is lost where the rate changes
    bands, found = {"below_8_khz": (0, min(top, 8000)), "above_8_khz": (8000, top)}, {}
    for name, hertz in bands.items():
        low, high = (int(each * 4 * _HOP / _RATE) for each in hertz)
        found[name] = float((first - second)[:, low:high].square().mean(-1).sqrt().mean())
    return found


def measure_voice(options: argparse.Namespace) -> dict[str, Any]:
    """A row of figures for the recordings, and one for each codec."""
    prompts = choose(options.recordings, read_texts(options.texts), options.count)
    scorers = Scorers(
        open_recognizer(options.recognizer),
        open_speaker_encoder("resemblyzer"),
        open_opinion_predictor("dnsmos"),
        pitch=PitchTracker(),
    )
    assert scorers.pitch is not None
    codecs = {name: build_codec(name) for name in options.codecs}
    scores: dict[str, list[UtteranceScore]] = {name: [] for name in ("recordings", *codecs)}
    compared: dict[str, list[dict[str, float]]] = {name: [] for name in codecs}
    seconds, spent = 0.0, dict.fromkeys(codecs, 0.0)
    for path, text in tqdm(prompts, desc="voice"):
        samples, rate = decode(str(path))
        recording = Sound(torch.from_numpy(to_mono(samples)), rate)
        wanted, seconds = pitch_of(recording, scorers.pitch), seconds + recording.seconds
        scores["recordings"].append(score(recording, text, scorers, recording, "en"))
        for name, codec in codecs.items():
            given = resample(recording.waveform.numpy(), rate, codec.sample_rate)
            latents = codec.encode(torch.from_numpy(given))
            began = time.process_time()
            made = codec.decode(latents)[: len(given)]
            spent[name] += time.process_time() - began
            sound = Sound(made, codec.sample_rate)
            scores[name].append(score(sound, text, scorers, recording, "en"))
            errors = pitch_errors(wanted, pitch_of(sound, scorers.pitch))
            compared[name].append(errors | spectral_distances(recording, sound))
    rows = {name: figures(each, compared.get(name, [])) for name, each in scores.items()}
    for name, codec in codecs.items():
        rows[name]["seconds_a_second"] = spent[name] / seconds / torch.get_num_threads()
        rows[name]["against_first"] = against(scores[name], scores[options.codecs[0]])
    return {"recordings": len(scores["recordings"]), "seconds": seconds, "rows": rows}


def figures(scores: list[UtteranceScore], compared: list[dict[str, float]]) -> dict[str, Any]:
    """Means with their intervals."""
    found = {
        "dnsmos": mean_interval([each.opinion for each in scores]),
        "words_wrong": rate_interval(*wrong_words(scores)),
        "similarity": mean_interval([each.speaker_similarity for each in scores]),
        **{key: mean_interval([each[key] for each in compared]) for key in (compared or [{}])[0]},
    }
    return {name: vars(interval) for name, interval in found.items()}


def wrong_words(scores: list[UtteranceScore]) -> tuple[list[int], list[int]]:
    """Wrong words and words of each recording."""
    errors = [each.errors for each in scores if each.errors is not None]
    return [each.word_errors for each in errors], [each.words for each in errors]


def against(scores: list[UtteranceScore], first: list[UtteranceScore]) -> dict[str, Any]:
    """Differences to the first codec, recording by recording."""
    (wrong, words), (wrong_of_first, _) = wrong_words(scores), wrong_words(first)
    found = {
        "dnsmos": difference([s.opinion for s in scores], [s.opinion for s in first]),
        "words_wrong": difference(wrong, wrong_of_first, words),
        "similarity": difference(
            [s.speaker_similarity for s in scores], [s.speaker_similarity for s in first]
        ),
    }
    return {name: vars(interval) for name, interval in found.items()}


def show_voice(report: dict[str, Any]) -> None:
    shown = {"dnsmos": 2, "words_wrong": 3, "similarity": 3, "pitch_cents": 1}
    shown |= {"pitch_far_off": 1, "voicing_wrong": 1, "below_8_khz": 1, "above_8_khz": 1}
    print(f"| {report['recordings']} recordings | {' | '.join(shown)} | s a second |")
    print("|---" * (len(shown) + 2) + "|")
    for name, row in report["rows"].items():
        cells = [interval(row[key], digits) if key in row else "" for key, digits in shown.items()]
        print(f"| {name} | {' | '.join(cells)} | {row.get('seconds_a_second', 0):.3f} |")
    for name, row in report["rows"].items():
        for key, value in row.get("against_first", {}).items():
            print(f"{name}, {key}: {interval(value, shown[key])} more than with the first codec")


def interval(found: dict[str, float], digits: int) -> str:
    """Value (low to high), of 95 %."""
    value, low, high = (f"{found[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recordings", type=Path, required=True, help="a folder of them")
    parser.add_argument(
        "--texts", type=Path, required=True, help='theirs: lines "name: text", or a .jsonl'
    )
    parser.add_argument("--count", type=int, default=50, help="of recordings")
    parser.add_argument("--codecs", nargs="+", default=["mel_dct"])
    parser.add_argument("--recognizer", default="whisper-tiny.en")
    parser.add_argument("--output", type=Path, default=RESULTS / "codec_voice.json")
    options = parser.parse_args(args)
    voice = measure_voice(options)
    write_report(options.output, voice)
    show_voice(voice)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
