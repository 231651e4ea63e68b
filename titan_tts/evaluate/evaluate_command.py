"""`titan-tts evaluate`: scores the speech of runs on held-out texts, as a table, a page and JSON."""

import shutil
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from titan_tts.evaluate.options import Options, check_options, scorer_specs
from torchtitan.models.dit_tts.errors import require_modules, show
from torchtitan.models.dit_tts.files import check_writable, write_atomic


def run(options: Options) -> int:
    check_options(options)
    require_modules("soundfile", "soxr", "matplotlib")
    from torchtitan.tools.utils import device_type

    from titan_tts.evaluate import report
    from titan_tts.evaluate.evaluate import (
        Evaluation,
        find_systems,
        is_training_data,
        output_folder,
    )
    from titan_tts.evaluate.page import evaluation_page, shown_utterances
    from titan_tts.evaluate.prompts import read_prompts
    from titan_tts.report.words import size_text
    from torchtitan.models.dit_tts.added_tokens import AddedTokens
    from torchtitan.models.dit_tts.config.job_config import JobConfig
    from torchtitan.models.dit_tts.speech.scoring.pitch import PitchTracker
    from torchtitan.models.dit_tts.speech.scoring.plugins import open_scorers

    began = time.monotonic()
    systems = find_systems(options)
    folder = output_folder(options, systems)
    check_writable(folder / "evaluation.json", "--out")
    configs = [run.config for run in systems.values()]
    config = configs[0] if configs else JobConfig()
    specs: Any = scorer_specs(options, config)
    samples = replace(config.samples, **specs)
    tests = read_prompts(options, config.data)
    trained = {name: is_training_data(options.test, tests, run) for name, run in systems.items()}
    scorers = open_scorers(
        samples,
        AddedTokens(config.encoder.added_tokens),
        device_type,
        ((prompt.text, prompt.language) for prompt in tests.prompts),
    )
    if samples.speaker_scorer:
        scorers = replace(scorers, pitch=PitchTracker())
    if (folder / "evaluation.json").is_file():  # wavs of an earlier evaluation are not of this one
        shutil.rmtree(folder / "wavs", ignore_errors=True)
    evaluation = Evaluation(options, folder, systems, tests, scorers)
    for rows in evaluation.rows():  # a system that fails leaves the figures of those before
        about = {
            "test": {
                "source": options.test,
                "utterances": len(tests.prompts),
                "left_out": tests.left_out,
                "without_reference": sum(prompt.voice is None for prompt in tests.prompts),
                "without_recording": sum(prompt.load_recording is None for prompt in tests.prompts),
                "is_training_data": any(trained.values()),
                "unknown_training_data": [name for name in systems if trained[name] is None],
            },
            "scorers": {
                name: None if scorer is None else scorer.name
                for name, scorer in vars(evaluation.scorers).items()
                if name != "added"
            },
            "options": asdict(options),
            "seconds": time.monotonic() - began,
        }
        found = report.build(rows, tests.prompts, evaluation.codec.frames_per_second, about)
        write_atomic(folder / "evaluation.json", evaluation_page(found).json() + "\n")
    page = evaluation_page(found, shown_utterances(found, evaluation, options.on_page))
    size = page.write(folder / "evaluation.html")
    show(f"\n{page.text()}")
    for warning in page.warnings:
        show(f"warning: {warning}", sys.stderr)
    show(f"\nevaluation.html ({size_text(size)}), evaluation.json, wavs/: {folder}")
    return 0
