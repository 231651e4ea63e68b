"""How wrong the lengths of held-out texts are: the fit on the training data, the rate rule, and predictors.

    python benchmarks/durations.py outputs/duration --test outputs/data/spoken_digits/heldout

Every text is that of a held-out sample, whose own length is the right one. The reference is the sample's,
another utterance of its speaker. Without a speaker's name the fit knows no rate of the voice; with a
reference's text its length counts (docs/duration.md).

Writes benchmarks/results/durations.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from titan_tts.evaluate.options import Options  # noqa: E402
from titan_tts.evaluate.prompts import PREPARED, read_prompts  # noqa: E402
from titan_tts.speak.lengths import FIT, open_lengths  # noqa: E402
from titan_tts.speak.load_run import load_run  # noqa: E402
from titan_tts.speak.utterance import Utterance, Voice  # noqa: E402
from torchtitan.models.dit_tts.files import write_atomic  # noqa: E402
from torchtitan.models.dit_tts.run.run_folder import environment  # noqa: E402
from torchtitan.models.dit_tts.text.durations import (  # noqa: E402
    LinearDurationModel,
    stored_durations,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("predictors", nargs="+", help="runs of the flavor duration")
    parser.add_argument("--test", required=True, help="held-out shards")
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/durations.json"))
    options = parser.parse_args()
    run = load_run(options.predictors[0])
    data = run.config.data
    found = read_prompts(Options(run=options.predictors[0], test=options.test), PREPARED, data)
    prompts = [p for p in found.prompts if p.reference is not None and p.reference_text]
    real = np.array([len(p.latents) for p in prompts if p.latents is not None], float)

    def fit() -> LinearDurationModel:
        return stored_durations(run.folder)

    rows: list[dict[str, Any]] = []
    cases = [(FIT, True, False), (FIT, False, False), (FIT, False, True)]
    cases += [(path, True, said) for path in options.predictors for said in (False, True)]
    for choice, named, said in cases:
        texts = [
            Utterance(
                p.text,
                Voice(
                    p.reference,
                    p.speaker if named else "",
                    p.reference_text if said else "",
                ),
                p.metadata if named else {},
            )
            for p in prompts
        ]
        lengths = np.array(open_lengths(choice, 1.0, run, fit).frames(texts))
        error = np.abs(lengths - real)
        rows.append(
            {
                "way": Path(choice).name,
                "speaker_known": named,
                "reference_text": said,
                "seconds_error": float(error.mean() / data.frames_per_second),
                "within_10_percent": float((error <= 0.1 * real).mean()),
            }
        )
        print(
            f"{Path(choice).name:24} {'speaker known' if named else '':14} {'its text known' if said else '':15} "
            f"{rows[-1]['seconds_error']:.3f} s  {rows[-1]['within_10_percent']:.0%} within 10 %"
        )
    report = {
        "utterances": len(prompts),
        "mean_seconds": float(real.mean() / data.frames_per_second),
        "rows": rows,
        "environment": environment(),
    }
    write_atomic(Path(options.output), json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
