"""`titan-tts data inspect`: the contents of a dataset, from its indexes alone."""

import math
from dataclasses import dataclass
from typing import Annotated

import tyro

from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError, show

Paths = Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="PATH [PATH ...]")]


@dataclass
class DatasetOptions:
    """Options of `inspect` and `doctor`."""

    path: Paths
    """Shards as for [data] path: folder, .tar, glob, pattern with braces or URL. Several are one dataset."""

    latent_channels: int = 128
    """Width of a latent frame."""

    top: int = 10
    """Number of the most frequent speakers (languages ...) listed."""

    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass
class Options(DatasetOptions):
    """Show lengths, speakers and labels of a dataset from its indexes."""

    frames_per_second: float = 25.0
    """Latent frames per second of audio."""


def run(options: Options) -> int:
    check_input(options.path, options.frames_per_second)

    from titan_tts.doctor.page import inspect_page
    from titan_tts.doctor.summary import summarize
    from torchtitan.models.dit_tts.data.dataset import open_dataset

    dataset = open_dataset(options.path, options.latent_channels, on_error="report")
    page = inspect_page(summarize(dataset, options.path, options.frames_per_second, options.top))
    show(page.json() if options.json else page.text())
    return 0


def check_input(paths: list[str], frames_per_second: float) -> None:
    """Raises InputError for options that no dataset fits."""
    if not 0 < frames_per_second < math.inf:
        raise InputError(
            f"--frames-per-second = {frames_per_second}, but it must be positive and finite"
        )
    for path in paths or [""]:
        find_shards(path)  # before seconds of imports
