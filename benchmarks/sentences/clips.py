"""A page on which one hears speech arise: the same unseen sentences after ever more steps of training.

    python -m benchmarks.sentences.trials --recipes phones --steps 250 500 1000 2500 --sets heldout
    python -m benchmarks.sentences.clips          # docs/clips/sentences/index.html

The sentences are the first of the held-out set, whatever became of them.
"""

import argparse
import html
import json
import sys
from pathlib import Path

import soundfile

from benchmarks.sentences.corpus import FOLDER, ROOT
from benchmarks.sentences.trials import RESULTS, RUNS, Trial
from torchtitan.models.dit_tts.errors import InputError, report_input_errors
from torchtitan.models.dit_tts.files import write_atomic

OUT = ROOT / "docs/clips/sentences"
COUNT = 3
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Speech arises</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
td, th {{ padding: .3rem .8rem; text-align: left; vertical-align: top }} audio {{ width: 14rem }}</style>
<h1>Speech arises</h1>
<p>{about}</p>
<table>
<tr><th></th>{texts}</tr>
{rows}
</table>
"""


def wavs_of(trial: Trial, runs: Path) -> Path:
    """The folder of a trial's sounds, one per held-out sentence."""
    found = [*(runs / trial.name / "evaluation/heldout/wavs").glob(f"{trial.name}*/seed-0")]
    if len(found) != 1:
        raise InputError(
            f"{runs / trial.name} has no sounds; make the trial with benchmarks.sentences.trials"
        )
    return found[0]


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", nargs="+", type=int, default=[250, 500, 1000, 2500])
    parser.add_argument("--size", default="5h")
    parser.add_argument("--corpus", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(args)
    made = {
        json.dumps(row["trial"]): row for row in json.loads(options.results.read_text())["rows"]
    }
    columns: list[tuple[str, Path]] = []
    for steps in options.steps:
        trial = Trial("phones", steps, 0, options.size, "debug")
        row = made[json.dumps(vars(trial))]
        wer = row["sets"]["heldout"]["wer"]
        label = f"{steps} steps, {row['core_seconds']:.0f} s of a core: {100 * wer:.0f} % of 100 sentences' words wrong"
        columns.append((label, wavs_of(trial, options.runs)))
    listed = [
        json.loads(line)
        for line in (options.corpus / options.size / "recordings.jsonl").read_text().splitlines()
    ]
    texts = {row["key"]: row for row in listed if row["split"] == "test"}
    keys = sorted({path.stem for path in columns[0][1].glob("*.wav")})[:COUNT]
    OUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for label, folder in [*columns, ("the recording", options.corpus / "wavs")]:
        cells = []
        for number, key in enumerate(keys):
            name = f"{number}-{label.split(',')[0].replace(' ', '-')}.flac"
            samples, rate = soundfile.read(folder / f"{key}.wav", dtype="float32")
            soundfile.write(OUT / name, samples, rate)
            cells.append(f'<td><audio controls preload="none" src="{name}"></audio></td>')
        rows.append(f"<tr><th>{html.escape(label)}</th>{''.join(cells)}</tr>")
    about = (
        "Sentences that training has not, in voices that it has, after ever more steps of about 8 samples of the flavor "
        "debug (3.8 million parameters) on 5 hours of sentences of a synthesizer, with phones and the codec mel_dct "
        "(16 kHz). benchmarks/README.md says how they were made."
    )
    heads = "".join(
        f"<th>{html.escape(texts[key]['text'])} ({texts[key]['speaker']})</th>" for key in keys
    )
    page = _PAGE.format(about=html.escape(about), texts=heads, rows="\n".join(rows))
    write_atomic(OUT / "index.html", page)
    print(OUT / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
