"""The referee: a voice compared with the recordings of its texts, judged by parts that share nothing with this project.

    python benchmarks/referee.py outputs/base --harvard harvard-sentences.txt --voices slt rms
    python benchmarks/referee.py outputs/base outputs/student --list joe.jsonl heldout.jsonl
    python benchmarks/referee.py --list recordings.jsonl           # no model: the recordings and the codec's copies
    python benchmarks/referee.py --report outputs/referee/referee.json

Whisper tiny.en hears the words (transcripts are compared after Whisper's normalizer), DNSMOS judges the quality,
Resemblyzer's encoder the voice, SwiftF0 measures F0. A set is a list (JSON lines: text, speaker, audio; other formats of
`titan-tts prepare` are read, too), or sentences of --harvard that flite says. Each set is one `titan-tts evaluate`, with a
row of the recordings and one of the codec; a prompt's reference is another recording of its speaker. --texts and --draw
choose sentences by what they say, so that sets of other voices have the same ones.

The repository does not have the Harvard sentences (IEEE Recommended Practice for Speech Quality Measurements, 1969), as
nobody has licensed them. data-raw/harvard-sentences.txt of github.com/tidyverse/stringr has the 720, one in a line.

Writes into --out: SET/evaluation.html (to hear all), SET/evaluation.json and SET/wavs/ of each set, referee.json (figures,
transcripts, conditions) and referee.md (the table).
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write_report  # noqa: E402
from titan_tts.cli import main as titan_tts  # noqa: E402
from titan_tts.evaluate.report import FIGURES, SPEED  # noqa: E402
from titan_tts.records.columns import drawn  # noqa: E402
from titan_tts.records.json_lines import text_lines  # noqa: E402
from titan_tts.records.utterance import HELDOUT  # noqa: E402
from torchtitan.models.dit_tts.bounded import parse_json, read_bytes, read_json  # noqa: E402
from torchtitan.models.dit_tts.data.heldout import split_of  # noqa: E402
from torchtitan.models.dit_tts.errors import reading, report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.statistics import difference  # noqa: E402

Rows = list[dict[str, Any]]
OPTIONS = (
    ("--harvard", "", "file of the Harvard sentences, one in a line"),
    ("--texts", 100, "of each set; 0: all"),
    ("--draw", 0, "seed of the texts' choice"),
    ("--seeds", 3, "of the noise"),
    ("--recognizer", "whisper-tiny.en", "as of titan-tts evaluate"),
    ("--speaker-scorer", "resemblyzer", "likewise"),
    ("--opinion", "dnsmos", "likewise"),
    ("--codec", "", "of the recordings' copies, where there is no model"),
    ("--out", str(ROOT / "outputs/referee"), "folder to write to"),
    ("--report", "", "print the table of this referee.json, and measure nothing"),
)
"""name, default, help"""

COLUMNS = {
    "wer": "words wrong",
    "opinion": "DNSMOS",
    "speaker_similarity": "similarity",
    "pitch": "F0, Hz",
    "pitch_range": "F0 range, semitones",
}
_NUMBER = re.compile(r"^\s*\d+[.):]?\s+")


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("models", nargs="*", help="runs or exported folders; none: only recordings and codec")
    add("--list", nargs="+", default=[], metavar="SET", help="lists of recordings with texts")
    add("--voices", nargs="+", default=["slt"], help="of flite, each says --harvard as a set")
    for name, default, words in OPTIONS:
        add(name, type=type(default), default=default, help=words)
    return parser.parse_args(args)


def choose(texts: Sequence[str], count: int, seed: int) -> list[int]:
    """Indices of `count` texts (0: all) in their order, by what each says and the seed alone."""
    ranked = sorted(range(len(texts)), key=lambda index: drawn(texts[index], seed))
    return sorted(ranked[: count or None])


def harvard_sentences(path: str) -> list[str]:
    """The sentences of a file, without numbers and headings (up to three words, or "Harvard")."""
    lines = [_NUMBER.sub("", line).strip() for line in text_lines(path)]
    found = [each for each in lines if len(each.split()) > 3 and "harvard" not in each.lower()]
    require(bool(found), f"--harvard {path}: has no sentence; give one in a line")
    return found


def spoken(texts: Sequence[str], voice: str, folder: Path) -> Rows:
    """Rows of a list, whose sound flite makes in recordings/ of a set's folder."""
    has_flite = shutil.which("flite") is not None
    require(has_flite, "the program flite is missing; install it (Debian: apt-get install flite)")
    folder = folder.resolve() / "recordings"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, text in enumerate(texts):
        wav = folder / f"{number:03d}.wav"
        wav.unlink(missing_ok=True)
        subprocess.run(["flite", "-voice", voice, "-t", text, "-o", wav], capture_output=True)
        require(wav.is_file(), f"--voices {voice}: flite did not say {text!r}; see flite -lv")
        rows.append({"text": text, "speaker": voice, "audio": str(wav)})
    return rows


def listed(path: str, options: argparse.Namespace) -> Rows:
    """Chosen rows of a list of JSON lines, the held-out ones if it has any, as `evaluate` takes; their sound can be
    opened from anywhere."""
    rows, folder = [], Path(path).resolve().parent
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            where = f"--list {path} line {number}"
            with reading(where, "give an object of JSON in each line"):
                row = parse_json(line)
            given = [row.get(key) for key in ("text", "audio")] if isinstance(row, dict) else [None]
            complete = all(isinstance(each, str) for each in given)
            require(complete, f"{where}: is not an object with the strings text and audio")
            rows.append(row | {"audio": str(folder / row["audio"])})
    rows = [row for row in rows if split_of(row.get("split")) == HELDOUT] or rows
    return [rows[i] for i in choose([row["text"] for row in rows], options.texts, options.draw)]


def sets_of(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], Rows] | str]]:
    """(name, what makes its rows in the set's folder, or a source of another format) of each set."""
    if options.harvard:
        texts = harvard_sentences(options.harvard)
        texts = [texts[index] for index in choose(texts, options.texts, options.draw)]
        for voice in options.voices:
            yield f"harvard-{voice}", partial(spoken, texts, voice)
    for path in options.list:
        rows = path.endswith(".jsonl")
        yield Path(path).stem, (lambda _, path=path: listed(path, options)) if rows else path


def judge(options: argparse.Namespace, folder: Path, source: str) -> dict[str, Any] | None:
    """Figures and transcripts of one set; None if the evaluation failed, which has said why."""
    arguments = [*(options.models or ["none"]), "--test", source, "--out", str(folder)]
    for name in ("recognizer", "speaker_scorer", "opinion", "codec", "seeds"):
        arguments.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    more = ["--max-utterances", str(options.texts), "--language", "en", "--on-page", "500"]
    if titan_tts(["evaluate", *arguments, *more]):
        return None
    found = read_json(folder / "evaluation.json", rows=list, utterances=list, scorers=dict)
    names, said = [row["name"] for row in found["rows"]], found["utterances"]
    for row in found["rows"]:
        row.pop("run", None)  # a path of this machine
        row["more_words_wrong"] = more_words_wrong(said, row["name"], names[0])
    transcripts = [
        {"text": each["text"], "speaker": each["speaker"]}
        | {name: [score["heard"] for score in each["scores"][name]] for name in names}
        for each in said
    ]
    kept = {key: found[key] for key in ("scorers", "rows", "differences", "seconds")}
    return kept | {"transcripts": transcripts}


def more_words_wrong(
    utterances: Sequence[Mapping[str, Any]], name: str, first: str
) -> dict[str, float] | None:
    """Rate of a row's wrong words less the first row's, by text, with its interval; None for that row."""
    if name == first:
        return None
    errors = [
        [[score["word_errors"] for score in each["scores"][row]] for each in utterances]
        for row in (name, first)
    ]
    words = [each["scores"][first][0]["words"] for each in utterances]
    return vars(difference(*(np.transpose(each) for each in errors), words))


def table(report: Mapping[str, Any]) -> str:
    """The figures of all sets in Markdown, with 95 % intervals over texts."""

    def cell(name: str, found: dict[str, float] | None, signed: bool = False) -> str:
        limits = FIGURES[name].limits(found, signed)
        text = FIGURES[name].text(found and found["value"], signed)
        return f"{text} ({limits})" if limits else text

    heads = ["set", "speech", *COLUMNS.values(), "real-time factor"]
    heads.insert(3, "more than the first row")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in report["sets"].items():
        for row in found["rows"]:
            cells = [f"{name} ({len(found['transcripts'])})", row["name"]]
            cells += [cell(each, row["figures"][each]) for each in COLUMNS]
            more = row["more_words_wrong"]
            cells.insert(3, cell("wer", more, signed=True) if more else "")
            cells.append(SPEED.text(row.get("real_time_factor")))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(args: list[str]) -> int:
    options = parse(args)
    if options.report:
        print(table(read_json(Path(options.report), sets=dict)))
        return 0
    asked, out = list(sets_of(options)), Path(options.out)
    require(bool(asked), "--list or --harvard is needed: recordings, or sentences to say")
    names = [name for name, _ in asked]
    unique = len(set(names)) == len(names)
    require(unique, f"two sets have one name ({', '.join(names)}); rename a list")
    sets = {}
    for name, source in asked:
        if not isinstance(source, str):
            rows, source = source(out / name), str(out / name / "recordings.jsonl")
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(source), lines)
        found = judge(options, out / name, source)
        if found is None:
            return 2
        sets[name] = found
    settings = {key: getattr(options, key) for key in ("texts", "draw", "seeds", "recognizer")}
    if options.harvard:
        settings["harvard_sha256"] = hashlib.sha256(read_bytes(options.harvard)).hexdigest()
    report = {"settings": settings, "sets": sets}
    write_report(out / "referee.json", report)
    write_atomic(out / "referee.md", table(report))
    print(f"\n{table(report)}")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
