"""Two voices in one text: each turn in the voice of its own reference, and a whistle where the text has its token.

python -m benchmarks.sentences.corpus --hours 5
python -m benchmarks.sentences.dialogue          # benchmarks/results/dialogue.json; 30 minutes of one core

A dialogue is a sentence, sometimes a whistle, and a sentence of another voice. Held out are sentences and pairs of
voices. Each dialogue is also spoken with swapped references, and without the whistle's token.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from benchmarks.quality.jobs import run_on, train_command
from benchmarks.quality.recipes import Recipe
from benchmarks.sentences.check_referee import hear
from benchmarks.sentences.corpus import FOLDER, ROOT, VOICES
from benchmarks.sentences.trials import COMMON, PHONES, interval
from titan_tts import from_pretrained
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance
from tools.harness.runs import last_line
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.errors import report_input_errors, require
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

RATE, HOP = 16_000, 640
PAUSE = np.zeros(RATE // 4, np.float32)
TURNS, EVENT = ("[S1]", "[S2]"), "(whistle)"
LONGEST, MAX_REFERENCE = 3.0, 128  # seconds of a sentence, frames of both references
SAMPLING_STEPS = 16
OUTPUT = ROOT / "outputs/sentences_dialogue"
COUNTS = {"train": 1400, "test": 24}
NAMES = [voice.name for voice in VOICES]
HELD_OUT = set(zip(NAMES, [*NAMES[1:], NAMES[0]]))
PAIRS = {
    "train": set(itertools.permutations(NAMES, 2)) - HELD_OUT,
    "test": HELD_OUT,
}
Row = Mapping[str, Any]


def whistle(random: np.random.Generator) -> np.ndarray:
    """(n,) A tone that falls from 3.0 to 1.5 kHz in about half a second, which no speech has."""
    n = int(RATE * random.uniform(0.4, 0.6))
    phase = 2 * np.pi * np.cumsum(np.linspace(3000, 1500, n)) / RATE
    return (0.2 * np.sin(phase) * np.minimum(1, np.hanning(n) * 4)).astype(np.float32)


def find_whistle(samples: np.ndarray) -> float | None:
    """Seconds to the middle of the longest tone above 1.2 kHz; None without one of 0.15 s."""
    size = 512
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(samples, size // 2), size)
    power = np.abs(np.fft.rfft(frames[:: RATE // 100] * np.hanning(size))) ** 2
    peak = power.argmax(1)
    near = np.abs(np.arange(power.shape[1]) - peak[:, None]) <= 6
    is_tone = (peak * RATE / size > 1200) & ((power * near).sum(1) > 0.7 * power.sum(1) + 1e-3)
    end, longest = 0, (14, None)
    for tone, group in itertools.groupby(is_tone):
        end += (n := len(list(group)))
        if tone and n > longest[0]:
            longest = n, (end - n / 2) / 100
    return longest[1]


def make_dialogues(rows: Sequence[Row], kind: str, count: int) -> list[Row]:
    """Writes sounds and returns rows for a list of `titan-tts prepare`; a pure function of the arguments."""
    random, pairs, made = (
        np.random.default_rng([0, *kind.encode()]),
        sorted(PAIRS[kind]),
        list[Row](),
    )
    for number in range(count):
        names, is_event = pairs[number % len(pairs)], number // len(pairs) % 2
        of = ([row for row in rows if row["speaker"] == name] for name in names)
        drawn = [[some[i] for i in random.choice(len(some), 2, replace=False)] for some in of]
        said, references = zip(*drawn)
        first, second = (read(row["audio"]) for row in said)
        path = OUTPUT / f"wavs/{kind}-{number:05d}.wav"
        event = [whistle(random), PAUSE] if is_event else []
        soundfile.write(path, np.concatenate([first, PAUSE, *event, second]), RATE, "PCM_16")
        texts = [row["text"] for row in said]
        turns = [*TURNS[:1], texts[0], *TURNS[1:], *([EVENT] if event else []), texts[1]]
        about = {"audio": str(path), "speaker": "+".join(names), "split": kind}
        about["reference"] = [row["audio"] for row in references]
        made.append({**about, "text": " ".join(turns), "texts": texts})
    return made


def prepare(corpus: Path) -> dict[str, list[Row]]:
    """The dialogues of each set, which are also shards in OUTPUT/data."""
    (OUTPUT / "wavs").mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (corpus / "recordings.jsonl").read_text().splitlines()]
    rows = [
        {**row, "audio": str(corpus / row["audio"])} for row in rows if row["seconds"] <= LONGEST
    ]
    sets = {}
    for kind, count in COUNTS.items():
        of = [row for row in rows if (row["split"] == "train") == (kind == "train")]
        sets[kind] = make_dialogues(of, kind, count)
    listed = OUTPUT / "dialogues.jsonl"
    write_atomic(listed, "".join(json.dumps(row) + "\n" for row in sets["train"] + sets["test"]))
    command = ["-m", "titan_tts", "prepare", str(listed), str(OUTPUT / "data"), "--overwrite"]
    command += ["--loudness", "off", "--max-silence", "off"]
    command += ["--max-reference-frames", str(MAX_REFERENCE)]
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    return sets


def train(steps: int, seed: int) -> Path:
    run = OUTPUT / f"steps-{steps}-seed-{seed}"
    settings = {
        **COMMON,
        **PHONES,
        "encoder.added_tokens": ",".join((*TURNS, EVENT)),
        "data.path": OUTPUT / "data/train",
        "data.max_speaker_frames": MAX_REFERENCE,
        "data.max_reference_ratio": 0.0,
        "data.max_text_tokens": 192,
        "training.steps": steps,
        "debug.seed": seed,
        "data.seed": seed,
        "validation.freq": max(1, steps // 4),
        "checkpoint.interval": max(1, steps // 4),
        "job.dump_folder": OUTPUT,
        "job.experiment": run.name,
    }
    log = OUTPUT / f"{run.name}.log"
    with log.open("a") as output:
        status, _ = run_on(0, train_command(Recipe("dialogue", ""), settings), output)
    require(not status, f"{run.name}: {last_line(log)} (log: {log})")
    return run


def read(path: str) -> np.ndarray:
    return soundfile.read(path, dtype="float32")[0]


def quietest(samples: np.ndarray, low: float, high: float) -> int:
    """The sample between two times in seconds about which a tenth of a second is quietest."""
    power = np.convolve(samples**2, np.ones(RATE // 10), "same")
    begin = max(0, int(low * RATE))
    return begin + int(power[begin : int(high * RATE)].argmin())


def judge(
    tts: Synthesizer, row: Row, text: str, references: Sequence[str], samples: np.ndarray
) -> Row:
    """What is heard of a sound, whose turns and whistle are searched for where the model expects the text's tokens."""
    tokens, places = AddedTokens((*TURNS, EVENT)).characters, tts.run.tokenizer.text_positions(text)
    at = dict(zip(tts.run.tokenizer.spoken(text), places[places >= 0] * len(samples) / RATE))
    first = second = quietest(samples, at[tokens[1]] - 0.4, at[tokens[1]] + 0.4)
    tone = find_whistle(samples)
    is_heard = tone is not None
    if EVENT in text:
        second = quietest(samples, at[tokens[2]], at[tokens[2]] + 0.8)
        is_heard = tone is not None and abs(tone - at[tokens[2]]) < 0.6

    def voice(of: np.ndarray) -> np.ndarray:
        return tts.codec.encode(torch.from_numpy(of)).numpy().mean(0)

    voices = [voice(read(path)[: MAX_REFERENCE // 2 * HOP]) for path in references]
    turns = []
    for number, part in enumerate((samples[:first], samples[second:])):
        far = [float(np.linalg.norm(voice(part) - each)) for each in voices]
        sound = Sound(torch.from_numpy(part), RATE)
        words = asdict(count_errors(row["texts"][number], hear(sound)))
        turns.append({"text": text, "own_voice": far[number] < far[1 - number], **words})
    return {"has_token": EVENT in text, "is_heard": is_heard, "turns": turns}


def figures(heard: Sequence[Row]) -> Row:
    """Of some dialogues; whistles are [heard, of so many]."""
    turns = []
    for of in zip(*(each["turns"] for each in heard)):
        wer = sum(turn["word_errors"] for turn in of) / sum(turn["words"] for turn in of)
        own = sum(turn["own_voice"] for turn in of) / len(of)
        between = interval(of, "word_errors", "words")
        turns.append({"wer": wer, "interval": between, "own_voice": own})
    tones = [
        [bool(each["is_heard"]) for each in heard if each["has_token"] == has] for has in (1, 0)
    ]
    whistles = {f"whistles_{n}_token": [sum(t), len(t)] for n, t in zip(("at", "without"), tones)}
    return {"turns": turns, **whistles}


def measure(tts: Synthesizer, rows: Sequence[Row]) -> Iterable[Row]:
    """Figures of each condition."""

    def speak(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[np.ndarray]:
        voices = map(tts.recording, references)
        asked = tts.requests([Utterance(*each) for each in zip(texts, voices, strict=True)])
        spoken = dict(tts.speak_sorted(asked, 0, 16))
        return [spoken[index].waveform.numpy() for index in range(len(texts))]

    texts, references = [row["text"] for row in rows], [row["reference"] for row in rows]
    recorded = [torch.from_numpy(read(row["audio"])) for row in rows]
    copies = [tts.codec.decode(tts.codec.encode(each)).numpy() for each in recorded]
    swapped = [each[::-1] for each in references]
    silent = [text.replace(f"{EVENT} ", "") for text in texts]
    for name, said, voices, sounds in (
        ("codec", texts, references, copies),
        ("generated", texts, references, []),
        ("swapped references", texts, swapped, []),
        ("without the token", silent, references, []),
    ):
        sounds = sounds or speak(said, voices)
        heard = [judge(tts, *each) for each in zip(rows, said, voices, sounds, strict=True)]
        yield {"condition": name, **figures(heard)}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the training; the noise's is 0")
    parser.add_argument("--corpus", type=Path, default=FOLDER / "5h")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/dialogue.json")
    options = parser.parse_args(args)
    sets = prepare(options.corpus.resolve())
    run = train(options.steps, options.seed)
    tts = from_pretrained(run, dtype="float32", sampling_steps=SAMPLING_STEPS)
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    about = {"steps": options.steps, "seed": options.seed, "sampling_steps": SAMPLING_STEPS}
    conditions = environment()
    del conditions["command"]  # has the paths of this machine
    for found in measure(tts, sets["test"]):
        rows.append({**about, **found})
        print(rows[-1], flush=True)
        content = {"rows": rows, "conditions": conditions}
        write_atomic(options.out, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
