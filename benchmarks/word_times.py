"""Errors of word times in speech of flite, which prints when it says each sound.

    python benchmarks/word_times.py                  # a minute of one core; needs flite, fortunes and wordnet-base
    python benchmarks/word_times.py titan_tts:base --texts 200 --voices slt rms

The sentences are those that the base voice was not trained on; of its voices, rms was not heard either. The model aligns what
flite said as it aligns its own speech. Prints median and 90th percentile of the absolute errors of starts and ends.
"""

import argparse
import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import soundfile  # noqa: E402
import torch  # noqa: E402

from recipes.base_voice.texts import corpus_texts  # noqa: E402
from titan_tts import from_pretrained  # noqa: E402
from titan_tts.speak.utterance import Speech  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors  # noqa: E402
from torchtitan.models.dit_tts.speech.audio import resample  # noqa: E402


def flite(voice: str, text: str, prints: str, out: str = "none") -> list[str]:
    command = ["flite", "-voice", voice, prints, "-t", text, "-o", out]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@cache
def phones(voice: str, word: str) -> tuple[str, ...]:
    return tuple(each for each in flite(voice, word, "-ps") if each != "pau")


def true_times(voice: str, text: str, path: str) -> list[tuple[float, float]]:
    """(begin, end) of each word in seconds; writes the sound to a path. The phones of the words alone tell which of the
    text's are of which word; empty where that is not certain."""
    sounds, begin = [], 0.0
    for name, end in (each.split(":") for each in flite(voice, text, "-psdur", path)):
        if name != "pau":
            sounds.append((name, begin, float(end)))
        begin = float(end)
    alone = [phones(voice, word) for word in text.split()]
    flat = [phone for word in alone for phone in word]
    place_of = np.zeros(len(flat) + 1)
    matcher = SequenceMatcher(None, flat, [name for name, *_ in sounds], autojunk=False)
    for _, first, last, to, until in matcher.get_opcodes():
        place_of[first : last + 1] = np.linspace(to, until, last - first + 1)
    edges = place_of[np.cumsum([0, *map(len, alone)])].round().astype(int).tolist()
    if any(first >= last for first, last in zip(edges, edges[1:])):
        return []
    return [(sounds[a][1], sounds[b - 1][2]) for a, b in zip(edges, edges[1:])]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="titan_tts:base")
    parser.add_argument("--texts", type=int, default=160)
    parser.add_argument("--voices", nargs="+", default=["slt", "awb", "kal16", "rms"])
    options = parser.parse_args(arguments)
    model, errors = from_pretrained(options.model), []
    texts = corpus_texts(0)[1][: options.texts]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/said.wav"
        for number, text in enumerate(texts):
            truth = true_times(options.voices[number % len(options.voices)], text, path)
            samples, rate = soundfile.read(path, dtype="float32")
            waveform = torch.from_numpy(resample(samples, rate, model.sample_rate))
            speech = Speech(waveform, model.sample_rate, model.codec.encode(waveform).cpu())
            found = model.word_times([text], [speech])
            if truth and len(found) == len(truth):
                times = np.array([(word.begin, word.end) for word in found])
                errors.append(1000 * np.abs(times - truth))
    of_all = np.concatenate(errors)
    low, high = np.percentile(of_all, (50, 90))
    print(
        f"{len(errors)} of {len(texts)} sentences, {len(of_all)} words: median {low:.0f} ms, 90 % below {high:.0f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
