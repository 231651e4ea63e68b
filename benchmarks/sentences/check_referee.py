"""Whether the referee hears what is said and nothing else: errors on recordings, codec, other texts and noise.

python -m benchmarks.sentences.corpus --hours 1
python -m benchmarks.sentences.check_referee          # benchmarks/results/sentences_referee.json
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from benchmarks.sentences.corpus import FOLDER, ROOT
from benchmarks.sentences.referee import (
    RATE,
    PhoneReferee,
    WordReferee,
    words,
)
from torchtitan.models.dit_tts.errors import report_input_errors
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import environment
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

RESULTS = ROOT / "benchmarks/results/sentences_referee.json"
LISTS = {"heldout": "recordings", "new_word": "new_word", "new_voice": "new_voice"}


@dataclass(frozen=True)
class Errors:
    word_errors: int
    words: int
    phone_errors: int
    phones: int


@cache
def _tools() -> tuple[WordReferee, PhoneReferee, Codec]:
    torch.set_num_threads(1)
    return words("cpu"), PhoneReferee(), build_codec("mel_dct")


def errors(text: str, sound: Sound) -> Errors:
    """Of a text's words and of the phones that the dictionary has for them."""
    hear_words, hear_phones, _ = _tools()
    by_word = count_errors(text, hear_words.transcribe(sound))
    by_phone = count_errors(hear_phones.units(text), hear_phones.transcribe(sound))
    return Errors(by_word.word_errors, by_word.words, by_phone.word_errors, by_phone.words)


def hear(sound: Sound) -> str:
    return _tools()[0].transcribe(sound)


def judge(task: tuple[Path, str, str]) -> dict[str, Errors]:
    """Errors of the recording, of the codec's copy, of the recording beside another text, and of noise."""
    path, text, other = task
    samples, rate = soundfile.read(path, dtype="float32")
    recording = Sound(torch.from_numpy(samples), rate)
    codec = _tools()[2]
    copy = Sound(codec.decode(codec.encode(recording.waveform)), RATE)
    noise = 0.1 * np.random.default_rng(len(text)).standard_normal(len(samples))
    return {
        "recordings": errors(text, recording),
        "codec": errors(text, copy),
        "other texts": errors(other, copy),
        "noise": errors(text, Sound(torch.from_numpy(noise.astype(np.float32)), rate)),
    }


def tasks(size: Path) -> Iterator[tuple[str, tuple[Path, str, str]]]:
    """(set and voice, task) of every held-out recording; the other text is the next one's."""
    for kind, name in LISTS.items():
        lines = (size / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["split"] == "test"]
        for row, after in zip(rows, [*rows[1:], rows[0]], strict=True):
            yield f"{kind}, {row['speaker']}", (size / row["audio"], row["text"], after["text"])


def rates(found: Sequence[Errors]) -> dict[str, Any]:
    wrong, of_words, wrong_phones, of_phones = map(sum, zip(*map(astuple, found), strict=True))
    return {"wer": wrong / of_words, "words": of_words, "phone_errors": wrong_phones / of_phones}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=Path, default=FOLDER / "1h")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    names, work = zip(*tasks(options.size), strict=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        judged = list(pool.map(judge, work, chunksize=4))
    rows: defaultdict[tuple[str, str], list[Errors]] = defaultdict(list)
    for name, each in zip(names, judged, strict=True):
        for source, found in each.items():
            rows[name, source].append(found)
            rows["all", source].append(found)
    report = [{"of": of, "source": source, **rates(each)} for (of, source), each in rows.items()]
    for row in report:
        print(
            f"{row['of']:16} {row['source']:12} {row['wer']:7.1%} of {row['words']:5} words, "
            f"{row['phone_errors']:6.1%} of the phones wrong"
        )
    content = {"rows": report, "conditions": environment()}
    write_atomic(options.out, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
