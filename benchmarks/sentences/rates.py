"""How much a reference whose text is known should correct the fit of lengths, where voices speak at many rates.

titan-tts prepare assets/spoken_digits/spoken_digits.tar outputs/data/spoken_digits --loudness off --max-silence off
python -m benchmarks.sentences.corpus --hours 5
python -m benchmarks.sentences.rates          # benchmarks/results/rates.json; 5 minutes of one core

A length is the fit's e times (r / e')^w: the reference has r frames, the fit gives e' to its text. Tried are fixed w, and
w = r / (r + k), by which a short reference counts little. Corpora: sentences in flite's voices, each at a rate of its own
or all at one, and the embedded digits. A held-out text's reference is another by its speaker at its rate, of one sentence
or three; e' is that of the whole text or the sum of its sentences'.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.sentences.corpus import FOLDER, ROOT
from benchmarks.sentences.grammar import sentences
from titan_tts.speak.long_text import split_text
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.text.durations import fit_durations

RESULTS = ROOT / "benchmarks/results/rates.json"
DIGITS = ROOT / "outputs/data/spoken_digits"
VOICES = ("slt", "rms", "kal16", "awb")
RATE, HOP = 16_000, 640  # of flite, and of a latent frame
SLOWEST, FASTEST = 1.4, 0.7  # duration_stretch
TRAIN, TESTS = 1000, 200
SENTENCES = 3  # of a long reference

WEIGHTS: dict[str, Callable[[float], float]] = {
    **{f"w = {w:g}": lambda r, w=w: w for w in (0, 0.25, 0.5, 0.75, 1)},
    **{f"k = {k}": lambda r, k=k: r / (r + k) for k in (10, 20, 35, 50, 75, 100, 200)},
}


@dataclass(frozen=True)
class Said:
    text: str
    frames: int


Test = tuple[Said, Said]  # a held-out recording and its reference


def say(text: str, voice: str, stretch: float, path: Path) -> Said:
    options = ["-voice", voice, "--setf", f"duration_stretch={stretch:.3f}"]
    subprocess.run(["flite", *options, "-t", text, "-o", path], check=True)
    return Said(text, -(-soundfile.info(path).frames // HOP))


def many_rates(folder: Path) -> tuple[list[Said], list[list[Said]]]:
    """Training recordings, and held-out ones of one, one and SENTENCES sentences, each time of one voice at one rate.
    What is there is not spoken again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, texts = np.random.default_rng(0), sentences(0, "train")

    def recorded(number: int, counts: Sequence[int]) -> list[Said]:
        stretch = SLOWEST * (FASTEST / SLOWEST) ** random.uniform()
        voice, path = VOICES[number % len(VOICES)], folder / "one.wav"
        some = [" ".join(itertools.islice(texts, count)) for count in counts]
        return [say(text, voice, stretch, path) for text in some]

    kept = folder / "said.json"
    if not kept.is_file():
        groups = [recorded(n, [1]) for n in range(TRAIN)]
        groups += [recorded(n, (1, 1, SENTENCES)) for n in range(TESTS)]
        write_atomic(kept, json.dumps([list(map(asdict, group)) for group in groups]))
    said = [[Said(**each) for each in group] for group in json.loads(kept.read_text())]
    return [group[0] for group in said[:TRAIN]], said[TRAIN:]


def one_rate(corpus: Path) -> tuple[list[Said], list[list[Said]]]:
    """The same of the sentences corpus, where a held-out recording's reference is the next one of its voice."""
    rows = [json.loads(line) for line in (corpus / "recordings.jsonl").read_text().splitlines()]
    by_voice: dict[str, list[Said]] = {}
    train = []
    for row in rows:
        said = Said(row["text"], -(-round(row["seconds"] * RATE) // HOP))
        if row["split"] == "train":
            train.append(said)
        else:
            by_voice.setdefault(row["speaker"], []).append(said)
    tests = [list(pair) for said in by_voice.values() for pair in itertools.pairwise(said)]
    return train[:TRAIN], tests


def as_dataset(said: Sequence[Said], folder: Path) -> Dataset:
    """Samples of which only texts and lengths are real."""
    folder.mkdir(parents=True, exist_ok=True)
    none = np.zeros((0, 1), np.float32)
    samples = (
        Triplet(f"{n:06d}", np.zeros((each.frames, 1), np.float32), none, {"text": each.text})
        for n, each in enumerate(said)
    )
    write_shard(folder / "000000.tar", samples)
    return open_dataset(str(folder), 1)


def digit_tests(dataset: Dataset) -> list[Test]:
    """Held-out digits with the recording that `prepare` has made their reference."""
    all_of = [dataset.metadata(i) for i in range(len(dataset))]
    by_key = {dataset.key(i): i for i in range(len(dataset))}
    said = [Said(about["text"], int(n)) for about, n in zip(all_of, dataset.frames)]
    return [(one, said[by_key[about["reference_key"]]]) for one, about in zip(said, all_of)]


def judge(train: Dataset, encoder: str, tests: Sequence[Test], by_sentence: bool) -> dict[str, Any]:
    """Mean relative errors of the ways to estimate the tests' lengths."""
    fit = fit_durations(train, Encoder(model=encoder))
    real = np.array([said.frames for said, _ in tests], float)
    frames = np.array([reference.frames for _, reference in tests], float)
    of_text = np.array([fit.estimate(said.text, None) for said, _ in tests])
    parts = [
        split_text(reference.text, lambda texts: [1.0] * len(texts))
        if by_sentence
        else [reference.text]
        for _, reference in tests
    ]
    of_reference = np.array([sum(fit.estimate(each, None) for each in some) for some in parts])
    bytes_of = [np.array([len(pair[i].text.encode()) for pair in tests]) for i in (0, 1)]
    ways = {"rate": bytes_of[0] * frames / bytes_of[1]}
    for name, weight in WEIGHTS.items():
        ways[name] = of_text * (frames / of_reference) ** np.array([weight(r) for r in frames])
    errors = {name: np.abs(length - real) / real for name, length in ways.items()}
    return {
        "tests": len(tests),
        "reference_frames": float(frames.mean()),
        "errors": {name: float(error.mean()) for name, error in errors.items()},
        "within_10_percent": {name: float((e <= 0.1).mean()) for name, e in errors.items()},
    }


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=FOLDER / "5h", help="of one rate")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/sentences_rates")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    rows = []

    def add(
        corpus: str, encoder: str, train: Dataset, tests: Sequence[Test], by_sentence: bool = False
    ) -> None:
        about = {"corpus": corpus, "encoder": encoder, "by_sentence": by_sentence}
        rows.append(about | judge(train, encoder, tests, by_sentence))
        shown = ", ".join(f"{name}: {error:.1%}" for name, error in rows[-1]["errors"].items())
        print(about, f"{rows[-1]['reference_frames']:.0f} frames: {shown}", flush=True)

    for corpus, (said, tests) in {
        "many rates": many_rates(options.folder),
        "one rate": one_rate(options.corpus),
    }.items():
        train = as_dataset(said, options.folder / corpus.replace(" ", "_"))
        for encoder in ("bytes", "phones:en-us"):
            add(corpus, encoder, train, [(each[0], each[1]) for each in tests])
            if len(tests[0]) > 2:
                for by_sentence in (False, True):
                    add(corpus, encoder, train, [(x[0], x[2]) for x in tests], by_sentence)
    heldout = open_dataset(str(DIGITS / "heldout"), 128)
    add("digits", "bytes", open_dataset(str(DIGITS / "train"), 128), digit_tests(heldout))
    about = environment()
    del about["command"]  # has the paths of this machine
    write_atomic(options.out, json.dumps({"rows": rows, "conditions": about}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
