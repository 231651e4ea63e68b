"""Does a model do what a caption says? Pairs of captions that differ in one word, measured by pitch, speed and level.

    python benchmarks/captions.py                    # half an hour of one core; needs flite

flite says digits in three voices, each with one of three pitches, speeds and levels. `titan-tts prepare --captions`
describes them (`--loudness off`: it would bring all to one level). A model of the flavor `debug` and a duration predictor
are trained on them from nothing. Then held-out texts are said twice, with "low" or "high", "slowly" or "fast",
"quiet" or "loud" in the same caption, with the same reference and seed. A pair is right if the sounds differ as the words
do: median F0 by SwiftF0, letters a second between the ends of the speech, loudness by BS.1770.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import soundfile  # noqa: E402

from benchmarks.common import RESULTS, spread, write_report  # noqa: E402
from recipes.lists import write_list  # noqa: E402
from titan_tts import from_pretrained  # noqa: E402
from titan_tts.cli import main as titan_tts  # noqa: E402
from titan_tts.prepare.processing import loudness, speech_span  # noqa: E402
from titan_tts.speak.utterance import Utterance  # noqa: E402
from torchtitan.models.dit_tts.data.dataset import open_dataset  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.interface import Sound  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.pitch import PitchTracker  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.statistics import rate_interval  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors  # noqa: E402

WORDS = "zero one two three four five six seven eight nine".split()
VOICES = ("slt", "awb", "kal16")  # rms takes no pitch
PITCHES, STRETCHES, LEVELS = (125, 157, 197), (1.35, 1.0, 0.75), (-32.0, -25.0, -18.0)
"""Hz, factors of the lengths, dB of the RMS below full scale; the middle one has no word"""
ATTRIBUTES = {
    "pitch": ("low", "high"),
    "speed": ("speaking slowly", "speaking fast"),
    "level": ("quiet", "loud"),
}
MAX_CAPTION = 96


def texts_of(count: int, seed: int, without: set[str]) -> list[str]:
    """Texts of two or three digits."""
    draw, found = random.Random(seed), list[str]()
    while len(found) < count:
        text = " ".join(draw.choices(WORDS, k=draw.choice((2, 3, 3))))
        found += [text] if text not in without else []
    return found


def speak(path: Path, text: str, voice: str, pitch: int, stretch: float, level: float) -> None:
    """By flite, without the silence at its ends."""
    settings = (f"int_f0_target_mean={pitch}", f"duration_stretch={stretch}")
    options = [part for each in settings for part in ("--setf", each)]
    subprocess.run(["flite", "-voice", voice, *options, "-t", text, "-o", path], check=True)
    samples, rate = soundfile.read(path, dtype="float32")
    start, stop = speech_span(samples, rate, 0.05)
    samples = samples[start:stop]
    samples *= 10 ** (level / 20) / np.sqrt(np.square(samples).mean())
    soundfile.write(path, np.clip(samples, -1, 1), rate)


def make_corpus(folder: Path, count: int) -> None:
    """list.jsonl, with the settings of each recording; a tenth of the texts is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(0), []
    tests = {*texts_of(count // 10, 1, set())}
    for number, text in enumerate([*texts_of(count, 2, tests), *sorted(tests)]):
        chosen = [draw.randrange(3) for _ in ATTRIBUTES]
        values = (scale[each] for scale, each in zip((PITCHES, STRETCHES, LEVELS), chosen))
        voice, name = VOICES[number % 3], f"{number:05d}"
        speak(folder / f"{name}.wav", text, voice, *values)
        row = {"key": name, "audio": f"{name}.wav", "text": text, "speaker": voice}
        split = "heldout" if text in tests else "train"
        rows.append(row | {"split": split, "settings": chosen, "language": "en"})
    write_list(folder / "list.jsonl", rows)


def command(*arguments: object) -> None:
    require(titan_tts([str(each) for each in arguments]) == 0, f"titan-tts {arguments[0]} failed")


def agreement(data: Path) -> dict[str, float]:
    """Fraction of the training samples whose caption has the word of the setting, by attribute; none for the middle."""
    dataset, right = open_dataset([str(data)], 128), Counter[str]()
    for sample in range(len(dataset)):
        found = dataset.metadata(sample)
        for (name, (below, above)), setting in zip(ATTRIBUTES.items(), found["settings"]):
            said = [each in found["caption"] for each in (below, above)]
            right[name] += said == [setting == 0, setting == 2]
    return {name: right[name] / len(dataset) for name in ATTRIBUTES}


def phrase(words: dict[str, str]) -> str:
    """Return a caption as `prepare` writes them."""
    first = f"a {words['pitch']} voice" if words["pitch"] else "a voice"
    return ", ".join(filter(None, (first, words["speed"], words["level"])))


def measured(text: str, sound: Sound, tracker: PitchTracker) -> dict[str, float]:
    samples, rate = sound.waveform.numpy(), sound.sample_rate
    start, stop = speech_span(samples, rate, 0.0)
    return {
        "pitch": tracker.measure(sound)[0] or 0.0,
        "speed": len(text.replace(" ", "")) * rate / (stop - start),
        "level": loudness(samples, rate),
    }


def obedience(run: Path, texts: list[str], seeds: int) -> dict[str, Any]:
    """Per attribute: the fraction of pairs in the right order, and what was measured with each word."""
    model, tracker, draw = from_pretrained(run), PitchTracker(), random.Random(3)
    hears = open_recognizer(f"words:{','.join(WORDS)}")
    cases = list(product(texts, VOICES))
    rows, errors, words_said = {}, 0, 0
    for name, (below, above) in ATTRIBUTES.items():
        others = [
            {each: draw.choice(("", *ATTRIBUTES[each])) for each in ATTRIBUTES if each != name}
            for _ in cases
        ]
        figures: dict[str, list[list[float]]] = {below: [], above: []}
        for seed, word in product(range(seeds), (below, above)):
            asked = [
                Utterance(text, model.speaker(voice), {"caption": phrase(words | {name: word})})
                for (text, voice), words in zip(cases, others)
            ]
            found = []
            for (text, _), sound in zip(cases, model.synthesize(asked, seed=seed)):
                found.append(measured(text, sound, tracker)[name])
                counted = count_errors(text, hears.transcribe(sound, "en"), "en")
                errors, words_said = errors + counted.word_errors, words_said + counted.words
            figures[word].append(found)
        wrong = np.array(figures[below]) >= np.array(figures[above])
        interval = rate_interval(wrong, np.ones(len(cases)))
        rows[name] = {
            "pairs": wrong.size,
            "right": [1 - each for each in (interval.value, interval.high, interval.low)],
            "right_by_seed": [float(1 - each.mean()) for each in wrong],
            "measured": {word: spread(np.ravel(each).tolist()) for word, each in figures.items()},
        }
        print(name, json.dumps(rows[name]))
    return {"attributes": rows, "words_wrong": errors / words_said}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recordings", type=int, default=900)
    parser.add_argument("--texts", type=int, default=12, help="held-out ones, each in every voice")
    parser.add_argument("--seeds", type=int, default=2, help="of the noise")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/captions")
    parser.add_argument("--out", type=Path, default=RESULTS / "captions.json")
    parser.add_argument("config_args", nargs=argparse.REMAINDER, help="-- and keys of the run")
    options = parser.parse_args(args)
    keys, folder = [each for each in options.config_args if each != "--"], options.folder
    if not (folder / "corpus/list.jsonl").is_file():
        make_corpus(folder / "corpus", options.recordings)
    data, source = folder / "data", folder / "corpus/list.jsonl"
    command("prepare", source, data, "--captions", "--loudness", "off", "--workers", 1)
    common = ["--data.path", data / "train", "--data.max_caption_tokens", MAX_CAPTION]
    common += ["--job.dump_folder", folder, "--validation.path", data / "heldout"]
    command("train", "debug", *common, "--job.experiment", "run", "--training.steps", 900, *keys)
    limits = [
        "--data.max_frames",
        64,
        "--data.max_text_tokens",
        40,
        "--data.max_speaker_frames",
        64,
    ]
    limits += ["--training.steps", 600]
    command("train", "duration", *common, *limits, "--job.experiment", "duration")
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    texts = [row["text"] for row in lines if row["split"] == "heldout"][: options.texts]
    report = {"captions_as_settings": agreement(data / "train"), "keys": keys}
    report |= obedience(folder / "run", texts, options.seeds)
    write_report(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
