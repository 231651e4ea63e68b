"""Options of `titan-tts finetune`."""

from dataclasses import dataclass, field
from typing import Literal

import tyro


@dataclass
class Options:
    """Train a model on recordings of a voice, from minutes to hours, and compare it with what it was."""

    base: tyro.conf.Positional[str]
    """The model to start from: a run's folder, a folder that `titan-tts export` wrote, or its hub name."""

    recordings: tyro.conf.Positional[str]
    """Recordings with their texts, in any layout that `titan-tts prepare` reads, or a folder that it wrote."""

    out: tyro.conf.Positional[str]
    """Folder for the data, the run and the comparison: data/, run/, evaluation/, comparison.html; also adapter/."""

    method: Literal["full", "lora"] = "full"
    """Train all weights, or low-rank updates of the decoder's projections, which are saved as some megabytes
    next to the base."""

    keep: str = ""
    """Training shards of the base: half of the samples are drawn from them, so that other voices are kept."""

    keep_test: str = ""
    """Held-out shards of the base, by which what is forgotten is measured."""

    language: str = ""
    """Language code of the texts, such as en. A base that reads phones of another language learns this one."""

    speaker: str = ""
    """Name of the speaker, if the recordings have none."""

    where: str = ""
    """Take only recordings with these values, as of `titan-tts prepare`: "speaker=s0002; quality=high,medium", or
    "annotated=true" for those whose texts people have corrected."""

    format: str = "auto"
    """Layout of the recordings, as of `titan-tts prepare`."""

    on_error: Literal["raise", "skip"] = "raise"
    """Stop at a recording that cannot be read, or leave it out."""

    heldout_fraction: float = 0.0
    """Fraction of the recordings that is not trained on and decides which step is the best; 0: a tenth, but at least
    12 recordings, or a third of fewer than 36."""

    codec: str = ""
    """Codec of the base's latents, if it is not in its folder: its path, or package.module:factory."""

    steps: int = 0
    """Steps of training; 0: by the minutes of speech."""

    nproc: int = 1
    """Processes that train, one per GPU."""

    recognizer: str = ""
    """Recognizer of the comparison, as of `titan-tts evaluate`; empty: the models are not compared."""

    max_utterances: int = 40
    """Maximum texts of each comparison; 0: all that are held out."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    """Keys of the run's config, --section.key value"""
