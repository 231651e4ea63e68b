"""A person's voice from minutes: what `titan-tts finetune titan_tts:base` makes of real prompts.

    apt-get install asterisk-core-sounds-en-g722 asterisk-core-sounds-en
    python benchmarks/person.py                          # outputs/person: 6 fine-tunes and one evaluation, hours
    python benchmarks/person.py --language es --base RUN --recognizer whisper-base    # the packages' Spanish prompts

The recordings are the prompts of one speaker (16 kHz, CC-BY-SA), with texts as the package gives them: single words, letters,
digits, half sentences. Every fine-tune has the same held-out prompts, which are spoken with one reference: prompts of the shorter
list, joined to 12 s. They are for measuring:
no weights and no clips of this voice are published. Prepared data, runs and the page (evaluation.html) stay in --out; a
second start goes on where the first one ended.
"""

import argparse
import gzip
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import write_report  # noqa: E402
from recipes.lists import write_list  # noqa: E402
from titan_tts.cli import main as titan_tts  # noqa: E402
from torchtitan.models.dit_tts.bounded import read_json  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.speech.audio import decode  # noqa: E402

SOUNDS = {"en": "en_US_f_Allison", "es": "es_MX_f_Allison"}  # below _FOLDER
_FOLDER = Path("/usr/share/asterisk/sounds")
_LINE = re.compile(r"([^;\s][^:]*):\s*([^\[]+)$")  # [notes] are no speech
_LONGEST = 12.0  # seconds; the base's limit is a little above
_LEAST_WORDS = 5  # of a held-out prompt
_RATE = 16_000

Rows = list[dict[str, Any]]


def prompts(language: str) -> Rows:
    """Rows of a list: all prompts with a text that the base's samples can be as long as, in the order of their names."""
    sounds = _FOLDER / SOUNDS[language]
    texts = Path(f"/usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz")
    installed = sounds.is_dir() and texts.is_file()
    require(installed, f"{sounds} and {texts} are needed; apt-get install the packages above")
    rows = dict[str, dict[str, Any]]()  # by key: some lines are there twice
    for line in gzip.decompress(texts.read_bytes()).decode().splitlines():
        said, path = _LINE.match(line), sounds
        if said and (path := sounds / f"{said[1].strip()}.g722").is_file():
            samples, rate = decode(str(path))
            row = {"key": said[1].strip().replace("/", "-"), "text": said[2].strip()}
            row |= {"audio": str(path), "speaker": "person", "seconds": len(samples) / rate}
            if row["seconds"] < _LONGEST and not row["key"].startswith("silence"):
                rows.setdefault(row["key"], row)
    return [rows[key] for key in sorted(rows)]


def lists_of(rows: Rows, minutes: list[float], heldout: int, reference: Path) -> dict[float, Rows]:
    """Minutes -> its training prompts and the held-out ones, which are the same for all; a list contains the shorter ones.
    Writes the reference: the longest prompts of the shortest list, with pauses, as the base takes no more."""
    order = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    test = [row for row in order if len(row["text"].split()) >= _LEAST_WORDS][:heldout]
    rest = [row for row in order if row not in test]
    until = np.cumsum([row["seconds"] for row in rest])
    shortest = [row for row, end in zip(rest, until, strict=True) if end <= 60 * min(minutes)]
    parts = [
        np.pad(decode(row["audio"])[0].reshape(-1), (0, _RATE // 5))
        for row in sorted(shortest, key=lambda row: -row["seconds"])[:6]
    ]
    soundfile.write(reference, np.concatenate(parts)[: 12 * _RATE], _RATE)
    held = [row | {"split": "heldout", "reference": str(reference.resolve())} for row in test]
    return {
        each: [
            row | {"split": "train"}
            for row, end in zip(rest, until, strict=True)
            if end <= 60 * each
        ]
        + held
        for each in minutes
    }


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", nargs="+", type=float, default=[5.0, 15.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the training")
    parser.add_argument("--heldout", type=int, default=40, help="prompts that no run has heard")
    parser.add_argument("--base", default="titan_tts:base")
    parser.add_argument("--language", choices=SOUNDS, default="en")
    parser.add_argument("--recognizer", default="whisper-tiny.en")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/person")
    parser.add_argument(
        "config_args", nargs=argparse.REMAINDER, help="-- and keys of the run's config"
    )
    options = parser.parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    runs, keys = [], [each for each in options.config_args if each != "--"]
    language, found = ["--language", options.language], prompts(options.language)
    for minutes, rows in lists_of(
        found, options.minutes, options.heldout, options.out / "reference.wav"
    ).items():
        listed = options.out / f"{minutes:g}-minutes.jsonl"
        write_list(listed, rows)
        for seed in options.seeds:
            out = options.out / f"{minutes:g}-minutes-seed-{seed}"
            seeds = ["--debug.seed", str(seed), "--data.seed", str(seed)]
            if status := titan_tts(
                ["finetune", options.base, str(listed), str(out), *language, *seeds, *keys]
            ):
                return status
            runs.append(f"{out / 'run'}@best")
    asked = [
        "--test",
        str(options.out / f"{options.minutes[0]:g}-minutes-seed-{options.seeds[0]}/data/heldout"),
        "--recognizer",
        options.recognizer,
        "--speaker-scorer",
        "resemblyzer",
        "--opinion",
        "dnsmos",
    ]
    asked += ["--max-utterances", "0", "--seeds", "1", *language]
    if status := titan_tts(
        ["evaluate", options.base, *runs, *asked, "--out", str(options.out / "evaluation")]
    ):
        return status
    said = read_json(options.out / "evaluation/evaluation.json", rows=list)["rows"]
    rows = [{"name": row["name"], "figures": row["figures"]} for row in said]
    write_report(options.out / "person.json", {"base": options.base, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
