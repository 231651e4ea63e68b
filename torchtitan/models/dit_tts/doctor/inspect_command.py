"""`titan-tts data inspect`: what a dataset holds, from its indexes alone."""

import glob
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from torchtitan.models.dit_tts.errors import InputError

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.data.dataset import Dataset


@dataclass
class Options:
    """What a dataset holds, from its indexes alone."""

    path: tyro.conf.Positional[list[str]]
    """As [data] path: folder, .tar, glob, pattern with braces or URL. Several are one dataset."""

    frames_per_second: float = 25.0
    """Latent frames per second of audio."""

    latent_channels: int = 128
    """Width of a latent frame."""

    top: int = 10
    """Speakers (languages ...) listed at either end."""

    json: bool = False
    """Print one JSON object and nothing else."""


def run(options: Options) -> int:
    from torchtitan.models.dit_tts.doctor.summary import summarize
    from torchtitan.models.dit_tts.doctor.text_report import show, show_json, summary_lines

    dataset = open_readable(options.path, options.latent_channels, options.frames_per_second)
    summary = summarize(dataset, options.path, options.frames_per_second, options.top)
    if options.json:
        show_json(summary)
    else:
        show("\n".join(summary_lines(summary)))
    return 0


def open_readable(paths: list[str], latent_channels: int, frames_per_second: float) -> "Dataset":
    """The dataset with its valid samples, however many are corrupt.

    Raises:
        InputError: nothing is there, arrays of another width, or no frame rate.
    """
    from torchtitan.models.dit_tts.data.dataset import open_dataset

    if not frames_per_second > 0:
        raise InputError(f"--frames-per-second = {frames_per_second}, but it must be positive")
    for path in paths:
        below = glob.glob(os.path.join(glob.escape(path), "*", "*.tar"))
        if below and not glob.glob(os.path.join(glob.escape(path), "*.tar")):
            folders = " or ".join(sorted({os.path.dirname(tar) for tar in below}))
            raise InputError(f"{path} has no .tar, but folders below it do; give {folders}")
    return open_dataset(paths, latent_channels, on_error="report")
