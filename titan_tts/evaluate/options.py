"""Options of `titan-tts evaluate`, and the checks before anything is loaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from titan_tts.speak.sampling_options import SamplingOptions
from torchtitan.models.dit_tts.config.trust import chosen_scorer
from torchtitan.models.dit_tts.errors import check_range, require

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.config.job_config import JobConfig


NO_RUN = "none"
"""Stands for RUN where recordings and codec are measured alone"""


@dataclass(kw_only=True)
class Options(SamplingOptions):
    """Measure the speech of runs on held-out texts; compare several runs or steps.

    RUN is a run's folder, FOLDER@STEP for one of its checkpoints (FOLDER@best for the one that [validation]
    keep_best kept), or FOLDER@STEP:WEIGHTS. none: no run, the recordings of --test and the codec's copies alone.
    """

    more: tyro.conf.Positional[tuple[str, ...]] = ()
    """Further runs, or steps of the same, to compare with."""

    test: str
    """A prepared folder, a corpus of any format of prepare, or a test list (docs/evaluate.md)."""

    recognizer: str = ""
    """Recognizer of the speech: whisper-tiny.en, whisper-base, words:one,two,..., whisper:SIZE, faster-whisper:SIZE or
    package.module:factory; the run's [samples] recognizer by default."""

    speaker_scorer: str = ""
    """Speaker encoder: resemblyzer, xvector:NAME or package.module:factory; the run's [samples] speaker_scorer by default."""

    opinion: str = ""
    """Predictor of opinion scores: dnsmos or package.module:factory; the run's [samples] opinion by default."""

    seeds: int = 2
    """Noise seeds per text, starting at --seed."""

    max_utterances: int = 0
    """Number of utterances, evenly over the speakers; 0: all."""

    batch_size: int = 16
    """Texts per batch."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the network. In float32 speech does not depend on its batch; in bfloat16, which is
    faster, it does. auto: as for generate."""

    out: str = ""
    """Folder to write to, replacing an earlier evaluation's files; RUN/evaluation/step-N-TEST by
    default, with chosen weights step-N-WEIGHTS-TEST, or evaluation-TEST-SYSTEMS next to the first of
    several runs."""

    on_page: int = 24
    """Utterances on the page, the worst first."""

    recordings: str = ""
    """Corpus with the original recordings of a prepared folder, to compare with."""

    data: str = ""
    """Training shards to estimate the lengths of texts from, instead of the run's own fit."""

    language: str = ""
    """Language code of texts that have none, such as en."""

    speaker: str = ""
    """Speaker of a corpus's recordings that have none."""


def check_options(options: Options) -> None:
    """Raises InputError for options out of range."""
    check_range("--seeds", options.seeds, 1, 100)
    check_range("--seed", options.seed, 0, 2**62)
    check_range("--batch-size", options.batch_size, 1, 4096)
    check_range("--max-utterances", options.max_utterances, 0, 10**9)
    check_range("--on-page", options.on_page, 0, 500)
    if options.run == NO_RUN:
        require(not options.more, f"{NO_RUN} stands for a run; give runs, or {NO_RUN} alone")
        require(bool(options.out), f"--out is not given, and {NO_RUN} has no folder; give one")


def scorer_specs(options: Options, config: "JobConfig") -> dict[str, str]:
    """Names of the scorers: of the options, else of the run's [samples]."""
    names = ("recognizer", "speaker_scorer", "opinion")
    specs = {
        name: chosen_scorer(name, getattr(options, name), getattr(config.samples, name))
        for name in names
    }
    require(
        bool(specs["recognizer"]),
        "--recognizer is not given, and the run's [samples] names none; give whisper:large-v3, or another of "
        "docs/evaluate.md",
    )
    return specs
