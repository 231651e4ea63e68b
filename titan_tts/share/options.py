"""Options of `titan-tts data export`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from titan_tts.jobs.workspace import WorkerOptions


@dataclass(frozen=True)
class Options(WorkerOptions):
    """Write shards as Parquet files for other tools, or as tars of compressed audio."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """Output of titan-tts prepare, or shards as in [data] path."""

    out: Annotated[Positional[str], arg(metavar="OUT")]
    """Folder to write; the same command again writes only what is missing."""

    to: Literal["parquet", "audio-tars"]
    """Parquet files of latents, or tars of KEY.mp3 (or KEY.flac) and KEY.json."""

    audio: Literal["mp3", "flac"] = "mp3"
    """Audio of the tars: mp3 of 64 kb/s, or flac of 16 bits."""

    codec: str = ""
    """Codec that decodes for audio tars; empty: the one in prepare.json."""
