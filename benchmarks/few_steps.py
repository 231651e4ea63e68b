"""A teacher compared with students that `titan-tts train distill` made from it, on held-out texts with the same noise.

    OMP_NUM_THREADS=1 python benchmarks/few_steps.py outputs/debug outputs/student ...    # a minute per row
    python benchmarks/few_steps.py --report                                # the table of what was measured

The teacher speaks as its config says, then in 8, 4 and 2 steps with its guidance and without; each student as its config says.
A pass is one utterance once through the network. `distance` is between the latents and those that the teacher makes of the same
noise by its own config: root mean square, relative to the teacher's. The voice is compared with the reference by the teacher's
speaker encoder. The real-time factor is CPU seconds of one thread per second of speech, sampling and decoding, in batches of 16.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # of the CPU

import torch  # noqa: E402

from benchmarks.common import RESULTS, write_report  # noqa: E402
from benchmarks.sampling import Case, Meter, compared  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors  # noqa: E402

DIGITS = "words:zero,one,two,three,four,five,six,seven,eight,nine"
FEWER = (8, 4, 2)


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "teacher", nargs="?", default="outputs/debug", help="run or exported folder"
    )
    parser.add_argument("students", nargs="*", help="runs or exported folders")
    parser.add_argument("--test", default="outputs/data/spoken_digits/heldout")
    parser.add_argument("--recognizer", default=DIGITS)
    parser.add_argument("--seeds", type=int, default=2, help="of the noise")
    parser.add_argument(
        "--report", action="store_true", help="the table of --out, measures nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "few_steps.json")
    return parser.parse_args(args)


def distance(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Root mean square of the differences of latents (frames, C), relative to the teacher's latents."""
    error = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (error / sum(float(each.square().sum()) for each in wanted)) ** 0.5


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    from titan_tts.evaluate.report import figures_of

    def meter_of(run: str) -> Meter:
        more = {"run": run, "dtype": "float32", "utterances": 0}
        return Meter(argparse.Namespace(**{**vars(options), **more}))

    meter = meter_of(options.teacher)
    own = meter.config.sampling
    cases = [(meter, Case("teacher", "teacher", 0, own, "float32"))]
    for steps in FEWER:
        fewer = replace(own, steps=steps)
        plain = replace(fewer, text_scale=0.0, speaker_scale=0.0, guidance="independent")
        for sampling, also in ((fewer, ""), (plain, ", no guidance")):
            name = f"teacher, {steps} steps{also}"
            cases.append((meter, Case("teacher", name, 0, sampling, "float32")))
    for run in options.students:
        student = meter_of(run)
        student.scorers = meter.scorers
        name = f"student {Path(run).name}"
        cases.append((student, Case("students", name, 0, student.config.sampling, "float32")))
    first, wanted, rows = None, [], []
    for of, case in cases:
        row, cost = of.measure(case)
        if first is None:
            first, wanted = row, meter.latents
        prompts, fps = of.tests.prompts, of.codec.frames_per_second
        figures = figures_of(row, prompts, fps)
        rows.append(
            {
                "name": case.name,
                "step": of.runs["float32"].step,
                "weights": of.runs["float32"].weights,
                "teacher_passes": of.config.distill.passes,
                "training_seed": of.config.debug.seed,
                "sampling": asdict(case.sampling) | {"codec": of.codec.name},
                **cost,
                **{name: figures[name] for name in ("wer", "speaker_similarity")},
                "distance": distance(of.latents, wanted),
                "against_teacher": {} if row is first else compared(row, first, prompts, fps),
            }
        )
        print(line(rows[-1], rows[0]), flush=True)
    return rows


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    wer = row["wer"]
    cells = [
        row["name"],
        str(row["network_passes"]),
        f"{100 * wer['value']:.1f} % ({100 * wer['low']:.1f} to {100 * wer['high']:.1f})",
        row["against_teacher"].get("wer", {}).get("verdict", ""),
        f"{row['distance']:.2f}",
        f"{row['speaker_similarity']['value']:.3f}",
        f"{row['real_time_factor']:.3f}",
        f"{first['real_time_factor'] / row['real_time_factor']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [line(row, rows[0]) for row in rows]
    head = "| | passes | words wrong | | distance | voice | real-time factor | times as fast |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *lines])


def main(args: list[str]) -> int:
    options = parse(args)
    if options.report:
        print(table(json.loads(options.out.read_text())["rows"]))
        return 0
    torch.set_num_threads(1)
    rows = measure_all(options)
    report = {
        "settings": {
            "test": Path(options.test).name,
            "noise_seeds": options.seeds,
            "recognizer": options.recognizer,
            "speaker_scorer": "the teacher's own speaker encoder, not independent",
        },
        "rows": rows,
    }
    write_report(options.out, report)
    print(f"\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
