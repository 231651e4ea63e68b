"""`titan-tts evaluate`: how well runs say held-out texts, as a table, a page and JSON."""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from torchtitan.models.dit_tts.errors import InputError, printable, require_modules
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.inference.generate_command import SamplingOptions

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.config.job_config import JobConfig
    from torchtitan.models.dit_tts.evaluation.test_sets import PromptSet


@dataclass(kw_only=True)
class Options(SamplingOptions):
    """Measure how well runs say texts that they were not trained on; compare several runs or steps.

    RUN is a run's folder, or FOLDER@STEP for one of its checkpoints (FOLDER@best: the one with the lowest
    held-out loss).
    """

    more: tyro.conf.Positional[tuple[str, ...]] = ()
    """Further runs, or steps of the same, to compare with."""

    test: str
    """A prepared folder, a corpus of any format of prepare, or a test list (docs/evaluate.md)."""

    test_format: str = "auto"
    """prepared, seed_tts, librispeech_pc or a format of prepare; auto detects it."""

    recognizer: str = ""
    """What writes down the speech: words:one,two,..., whisper:SIZE, faster-whisper:SIZE or
    package.module:factory; [samples] recognizer of the run by default."""

    speaker_scorer: str = ""
    """What compares voices: own, xvector:NAME or package.module:factory; none by default."""

    opinion: str = ""
    """What predicts opinion scores: dnsmos or package.module:factory; none by default."""

    seeds: int = 2
    """Noise seeds per text, from --seed on."""

    max_utterances: int = 0
    """Take an even selection of so many utterances; 0: all."""

    batch_size: int = 16
    """Texts that are synthesized together."""

    out: str = ""
    """Folder to write to; RUN/evaluation/step-N-TEST by default, or evaluation-TEST beside the first of
    several runs."""

    on_page: int = 24
    """Utterances to hear on the page, the worst first."""

    recordings: str = ""
    """Corpus with the original recordings of a prepared folder, to compare with."""

    audio_root: str = ""
    """Folder of the recordings of a librispeech_pc list, such as LibriSpeech/test-clean."""

    data: str = ""
    """Training shards, which lengths are estimated from; the run's [data] path by default."""

    language: str = ""
    """Language code of texts that have none, such as en."""

    speaker: str = ""
    """Speaker of a corpus's recordings that have none."""

    text_column: str = ""
    """Column of a corpus's text, where it is not text or another usual name."""

    speaker_column: str = ""
    """Column of a corpus's speaker, where it is not speaker or another usual name."""

    untrained: bool = False
    """Add a row of the first run's model before its training."""

    device: str = ""
    """Where recognizer and scorers run; the models' device by default."""


def run(options: Options) -> int:
    check_options(options)
    require_modules("soundfile", "soxr", "matplotlib")
    from torchtitan.models.dit_tts.evaluation import page, report
    from torchtitan.models.dit_tts.evaluation.evaluate import Evaluation
    from torchtitan.models.dit_tts.evaluation.systems import find_places
    from torchtitan.models.dit_tts.scoring.plugins import open_opinion_predictor, open_recognizer
    from torchtitan.models.dit_tts.scoring.scores import Scorers
    from torchtitan.tools.utils import device_type

    began = time.monotonic()
    places = find_places((options.run, *options.more), options.step)
    config = first_config(options, [place.folder for place in places])
    specs = scorer_specs(options, config)
    device = options.device or device_type
    recognizer = open_recognizer(specs["recognizer"], device)
    opinion = open_opinion_predictor(specs["opinion"], device) if specs["opinion"] else None
    kind, tests = read_tests(options, config)
    recognizer.check_texts([prompt.text for prompt in tests.prompts])
    scorers = Scorers(recognizer, None, opinion)
    evaluation = Evaluation(options, places, tests, scorers, specs["speaker_scorer"], device)
    rows = evaluation.rows()
    about = {
        "test": {
            "source": options.test,
            "format": kind,
            "utterances": len(tests.prompts),
            "left_out": tests.left_out,
            "without_reference": sum(prompt.reference is None for prompt in tests.prompts),
        },
        "scorers": {
            name: None if scorer is None else scorer.name
            for name, scorer in vars(evaluation.scorers).items()
        },
        "options": asdict(options),
        "seconds": time.monotonic() - began,
    }
    found = report.build(rows, tests.prompts, evaluation.codec.frames_per_second, about)
    folder = evaluation.folder
    write_atomic(folder / "evaluation.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    html = page.render(found, page.shown_utterances(found, evaluation, options.on_page))
    write_atomic(folder / "evaluation.html", html)
    say(found, folder, len(html))
    return 0


def check_options(options: Options) -> None:
    """Raises InputError for what can be seen without loading anything."""
    for name, low, high in (
        ("seeds", 1, 100),
        ("batch_size", 1, 4096),
        ("max_utterances", 0, 10**9),
        ("on_page", 0, 500),
    ):
        value = getattr(options, name)
        if not low <= value <= high:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} = {value}, but it must be from {low} to {high}")


def first_config(options: Options, folders: list[str]) -> "JobConfig":
    """The first run's config.

    Raises:
        InputError: the runs' latents are of different codecs.
    """
    from torchtitan.models.dit_tts.config.manager import load_run_config

    configs = [load_run_config(Path(folder)) for folder in folders]
    codecs = sorted({options.codec or config.sampling.codec for config in configs})
    if len(codecs) > 1:
        raise InputError(
            f"the runs have different codecs ({', '.join(codecs)}); evaluate them apart, or name the one "
            "codec of all by --codec"
        )
    return configs[0]


def scorer_specs(options: Options, config: "JobConfig") -> dict[str, str]:
    """What to score with: the options, else [samples] of the run.

    Raises:
        InputError: no recognizer.
    """
    samples = getattr(config, "samples", None)
    names = ("recognizer", "speaker_scorer", "opinion")
    specs = {name: getattr(options, name) or getattr(samples, name, "") for name in names}
    if not specs["recognizer"]:
        raise InputError(
            "--recognizer is not given, and the run's [samples] names none; give whisper:large-v3 (or "
            "another size, or a folder), faster-whisper:large-v3, package.module:factory, or "
            "words:one,two,... where every word of the texts is one of these"
        )
    return specs


def read_tests(options: Options, config: "JobConfig") -> tuple[str, "PromptSet"]:
    """The kind of --test, and its prompts."""
    from torchtitan.models.dit_tts.data.build import open_training_data
    from torchtitan.models.dit_tts.evaluation.test_sets import (
        add_recordings,
        find_kind,
        read_prompts,
    )

    kind = find_kind(options.test, options.test_format)
    names = ("speaker", "text_column", "speaker_column", "language")
    columns = {name: getattr(options, name) for name in names}
    tests = read_prompts(
        options.test,
        kind,
        lambda path: open_training_data(replace(config.data, path=path)),
        config.data.latent_channels,
        options.max_utterances,
        options.audio_root,
        columns,
    )
    if options.recordings:
        add_recordings(tests, options.recordings, columns)
    return kind, tests


def say(found: dict[str, Any], folder: Path, page_bytes: int) -> None:
    """The tables on stdout, and what to know about them on stderr."""
    from torchtitan.models.dit_tts.evaluation.report import text_tables

    test, options = found["test"], found["options"]
    print(
        printable(
            f"\n{test['utterances']} utterances of {test['source']}, {options['seeds']} seeds"
        )
    )
    print(f"recognizer: {printable(found['scorers']['recognizer'])}\n")
    print(printable(text_tables(found)))
    left_out = ", ".join(f"{count} {reason}" for reason, count in test["left_out"].items())
    if left_out:
        print(f"warning: utterances left out: {left_out}", file=sys.stderr)
    if test["without_reference"]:
        print(
            f"warning: {test['without_reference']} utterances have no reference of their voice, so they "
            "are said in any",
            file=sys.stderr,
        )
    if found["unfit_recognizer"]:
        print(f"warning: {found['unfit_recognizer']}", file=sys.stderr)
    size = f"{page_bytes / 2**20:.1f} MiB"
    print(f"\nevaluation.html ({size}), evaluation.json, wavs/: {printable(str(folder))}")
