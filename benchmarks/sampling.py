"""Compares ways of sampling at equal numbers of network passes, on a trained run.

    scripts/from_scratch.sh                                             # or another run
    OMP_NUM_THREADS=1 python benchmarks/sampling.py outputs/debug   # 10 to 15 minutes
    python benchmarks/sampling.py --report                          # the tables of what was measured

Every case says the held-out texts with the same noise seeds. A pass is one utterance once through the network:
one per evaluation of the velocity, and one more per branch of guidance. Within a budget each case has the most
evaluations that fit, so a dearer guidance or a solver of second order has fewer steps.

- solvers: euler, midpoint and heun by even and sway times, with the run's guidance;
- guidance: modes, intervals and CFG-Zero* by the run's solver and schedule; the scale of the speaker is that of
  the text where both are guided;
- savings: one after the other, from float32 and independent guidance of text and speaker on.

A difference from the first case of the same group and budget whose 95 % interval holds 0 is a tie. The
real-time factor is CPU seconds of one thread per second of speech, sampling and decoding, in batches of 16.
Writes benchmarks/results/sampling.json and prints the tables of benchmarks/README.md.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # of the CPU

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.common import RESULTS, write_report  # noqa: E402
from torchtitan.models.dit_tts.config.job_config import Sampling  # noqa: E402
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling  # noqa: E402
from torchtitan.models.dit_tts.errors import InputError, report_input_errors  # noqa: E402
from torchtitan.models.dit_tts.flow.solvers import network_passes, plan_steps  # noqa: E402
from torchtitan.models.dit_tts.speech.sampling.sampler import (  # noqa: E402
    SpeechRequest,
    encode_requests,
)

BUDGETS = (48, 24, 12, 8)
"""network passes per utterance"""

GUIDED_BUDGETS = (24, 12)
"""of guidance"""

GROUPS = ("solvers", "guidance", "savings")
FIGURES = ("wer", "speaker_similarity")


@dataclass(frozen=True)
class Case:
    """One way of sampling."""

    group: str
    name: str
    budget: int
    sampling: Sampling
    dtype: str


def passes(sampling: Sampling) -> int:
    return network_passes(plan_steps(sampling))


def within(sampling: Sampling, budget: int) -> Sampling | None:
    """The settings with the most evaluations that fit into so many network passes; None if none do."""
    for steps in range(budget, 0, -1):
        found = replace(sampling, steps=steps)
        try:
            check_sampling(found)
        except InputError:  # an odd number
            continue
        if passes(found) <= budget:
            return found
    return None


def cases(base: Sampling, dtype: str) -> Iterator[Case]:
    """Yield the cases of every group; the first of a group and budget is the one that the others are compared with.

    Args:
        base: the run's [sampling], with guidance by the text.
    """

    def fitted(group: str, name: str, budget: int, **settings: Any) -> Iterator[Case]:
        found = within(replace(base, **settings), budget)
        if found is not None:
            yield Case(group, name, budget, found, dtype)

    for budget in BUDGETS:
        for solver in ("euler", "midpoint", "heun"):
            for schedule in ("linear", "sway"):
                settings: dict[str, Any] = {"solver": solver, "schedule": schedule}
                yield from fitted("solvers", f"{solver}, {schedule}", budget, **settings)
    both: dict[str, Any] = {"speaker_scale": base.text_scale}
    modes: dict[str, dict[str, Any]] = {
        "text": {},
        "text and speaker": both,
        "joint": {**both, "guidance": "joint"},
        "alternating": {**both, "guidance": "alternating"},
        "text at all times": {"min_t": 0.0},
        "text in (0.5, 0.9]": {"max_t": 0.9},
        "none": {"text_scale": 0.0},
    }
    for budget in GUIDED_BUDGETS:
        for name, settings in modes.items():
            yield from fitted("guidance", name, budget, **settings)
    saved = replace(base, **both, solver="euler", schedule="linear", guidance="independent")
    savings: list[tuple[str, str, dict[str, Any]]] = [
        ("float32, text and speaker", "float32", {}),
        ("+ alternating", "float32", {"guidance": "alternating"}),
        ("+ half the steps", "float32", {"steps": base.steps // 2}),
        ("+ sway, a quarter", "float32", {"steps": base.steps // 4, "schedule": "sway"}),
        ("+ bfloat16", "bfloat16", {}),
    ]
    for name, precision, settings in savings:
        saved = replace(saved, **settings)
        yield Case("savings", name, 0, saved, precision)


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", nargs="?", default="outputs/debug", help="folder of a trained run")
    parser.add_argument(
        "--test", default="", help="held-out shards; by default those next to its data"
    )
    parser.add_argument("--recognizer", default="", help="by default [samples] recognizer")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--seeds", type=int, default=2, help="of the noise")
    parser.add_argument("--utterances", type=int, default=0, help="0: all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--report", action="store_true", help="the tables of --out, measures nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "sampling.json")
    return parser.parse_args(args)


class OwnVoice:
    """The model's own speaker encoder, which is not independent, of speech whose latents are known."""

    name = "the model's own speaker encoder"

    def __init__(self, run: Any):
        self.run = run

    @torch.no_grad()
    def embed(self, sounds: Sequence[Any]) -> np.ndarray:
        """(n, E): means over the encoder's patches."""
        run, limit = self.run, self.run.config.data.max_speaker_frames
        requests = [SpeechRequest("a", sound.latents[:limit]) for sound in sounds]
        encoded = encode_requests(run.model, run.tokenizer, requests, run.device, run.text_encoder)
        valid = encoded.speaker_mask[..., None]
        return ((encoded.speaker.float() * valid).sum(1) / valid.sum(1)).cpu().numpy()


class Meter:
    """Says the texts by a case and scores them: the parts of `titan-tts evaluate`, one run for all."""

    def __init__(self, options: argparse.Namespace):
        from titan_tts.evaluate.options import Options, scorer_specs
        from titan_tts.evaluate.prompts import encode_prompts, read_prompts
        from titan_tts.speak.lengths import FIT, open_lengths
        from titan_tts.speak.load_run import load_run
        from titan_tts.speak.speech_data import open_speech_data, reference_settings
        from torchtitan.models.dit_tts.speech.codec import build_codec
        from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer
        from torchtitan.models.dit_tts.speech.scoring.scores import Scorers

        self.seeds = options.seeds
        self.latents: list[torch.Tensor] = []
        """of the last case: of every text, seed by seed"""
        self.runs = {name: load_run(options.run, dtype=name) for name in {"float32", options.dtype}}
        run = self.runs["float32"]
        self.config = run.config
        beside = self.config.validation.path
        if not options.test and (not beside or isinstance(beside, list)):
            raise InputError(
                f"--test is needed: {options.run} has no single folder of held-out data"
            )
        self.test = options.test or str(beside)
        evaluated = Options(
            run=options.run,
            test=self.test,
            recognizer=options.recognizer,
            max_utterances=options.utterances,
        )
        self.codec = build_codec(self.config.sampling.codec, str(run.device))
        self.tests = read_prompts(evaluated, self.config.data)
        encode_prompts(self.tests, self.codec, reference_settings(self.config.data.path))
        durations = open_speech_data(run.folder, run.config).durations
        self.lengths = open_lengths(FIT, 1.0, run, lambda: durations)
        recognizer = open_recognizer(
            scorer_specs(evaluated, self.config)["recognizer"], str(run.device)
        )
        self.scorers = Scorers(recognizer, OwnVoice(run))

    def measure(self, case: Case) -> tuple[Any, dict[str, Any]]:
        """The scores as a row of evaluate's table, and what it cost."""
        from titan_tts.evaluate.evaluate import speak
        from titan_tts.evaluate.report import SYSTEM, Row
        from titan_tts.speak.speech_data import open_speech_data
        from titan_tts.speak.synthesizer import Synthesizer
        from titan_tts.speak.utterance import Speech
        from torchtitan.models.dit_tts.speech.scoring.scores import score

        run, prompts = self.runs[case.dtype], self.tests.prompts
        speaks = Synthesizer(
            run,
            self.codec,
            open_speech_data(run.folder, run.config),
            case.sampling,
            lambda: self.lengths,
        )
        scores, seconds, spoken_seconds = [], 0.0, 0.0
        self.latents = []
        for seed in range(self.seeds):
            began = time.process_time()
            spoken = dict(speak(speaks, prompts, seed, batch_size=16))
            seconds += time.process_time() - began
            spoken_seconds += sum(sound.seconds for sound in spoken.values())
            self.latents += [spoken[place].latents for place in range(len(prompts))]
            found = []
            for place, prompt in enumerate(prompts):
                voice = None
                if prompt.load_reference is not None:
                    heard = prompt.load_reference()
                    voice = Speech(heard.waveform, heard.sample_rate, prompt.voice)
                sound = spoken[place]
                found.append(score(sound, prompt.text, self.scorers, voice, prompt.language))
            scores.append(found)
        row = Row(case.name, SYSTEM, list(range(self.seeds)), scores)
        return row, {
            "network_passes": passes(case.sampling),
            "real_time_factor": seconds / spoken_seconds,
        }


def compared(row: Any, first: Any, prompts: Sequence[Any], fps: float) -> dict[str, Any]:
    """{figure: {"value", "low", "high", "verdict"}} of the row above the first of its group."""
    from titan_tts.evaluate.report import differences

    pair = [replace(row, name="this"), replace(first, name="first")]
    found = {}
    for each in differences(pair, prompts, fps):
        if each["figure"] in FIGURES:
            verdict = {"this": "better", "first": "worse", None: "tie"}[each["better"]]
            limits = {name: each[name] for name in ("value", "low", "high")}
            found[each["figure"]] = {**limits, "verdict": verdict}
    return found


def measure_all(meter: Meter, chosen: Sequence[Case]) -> list[dict[str, Any]]:
    from titan_tts.evaluate.report import figures_of

    prompts, fps = meter.tests.prompts, meter.codec.frames_per_second
    firsts: dict[tuple[str, int], Any] = {}
    measured: dict[str, tuple[Any, dict[str, Any]]] = {}
    rows = []
    for number, case in enumerate(chosen, 1):
        key = json.dumps([asdict(case.sampling), case.dtype])  # the same in two groups: once
        if key not in measured:
            measured[key] = meter.measure(case)
        row, cost = measured[key]
        first = firsts.setdefault((case.group, case.budget), row)
        figures = figures_of(row, prompts, fps)
        found = {
            "group": case.group,
            "name": case.name,
            "budget": case.budget,
            "dtype": case.dtype,
            "sampling": asdict(case.sampling) | {"codec": meter.codec.name},
            **cost,
            **{name: figures[name] for name in ("wer", "cer", "speaker_similarity")},
            "against_first": {} if row is first else compared(row, first, prompts, fps),
        }
        rows.append(found)
        print(f"[{number}/{len(chosen)}] {case.group}, {line(found)}", flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One line of a table of Markdown."""
    wer, similarity = row["wer"], row["speaker_similarity"]
    cells = [
        row["name"],
        str(row["sampling"]["steps"]),
        str(row["network_passes"]),
        f"{100 * wer['value']:.1f} % ({100 * wer['low']:.1f} to {100 * wer['high']:.1f})",
        row["against_first"].get("wer", {}).get("verdict", ""),
        "-" if similarity is None else f"{similarity['value']:.4f}",
        row["against_first"].get("speaker_similarity", {}).get("verdict", ""),
        f"{row['real_time_factor']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for every group and budget."""
    head = "| | `steps` | passes | WER | | speaker similarity | | real-time factor |"
    lines: list[str] = []
    for key in dict.fromkeys((row["group"], row["budget"]) for row in rows):
        of = f", at most {key[1]} passes" if key[1] else ""
        lines += ["", f"**{key[0]}{of}**", "", head, "|---|---|---|---|---|---|---|---|"]
        lines += [line(row) for row in rows if (row["group"], row["budget"]) == key]
    return "\n".join(lines[1:])


def main(args: list[str]) -> int:
    options = parse(args)
    if options.report:
        print(tables(json.loads(options.out.read_text())["rows"]))
        return 0
    torch.set_num_threads(1)
    began = time.process_time()
    meter = Meter(options)
    run = meter.runs["float32"]
    base = replace(meter.config.sampling, speaker_scale=0.0, guidance="independent")
    every = list(cases(base, options.dtype))
    chosen = [case for case in every if case.group in options.only]
    rows = measure_all(meter, chosen)
    report = {
        "run": {"name": Path(options.run).name, "step": run.step, "weights": run.weights},
        "settings": {
            "test": Path(meter.test).name,
            "utterances": len(meter.tests.prompts),
            "noise_seeds": options.seeds,
            "recognizer": meter.scorers.recognizer.name if meter.scorers.recognizer else "",
            "speaker_scorer": "the run's own speaker encoder, not independent",
            "threads": 1,
            "cpu_seconds": time.process_time() - began,
        },
        "rows": rows,
    }
    write_report(options.out, report)
    print(f"\n{tables(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
