"""`titan-tts data export`: shards as Parquet files that training reads, or as tars of compressed audio."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from torchtitan.models.dit_tts.errors import require_modules, show


@dataclass(frozen=True)
class Options:
    """Write shards as Parquet files, from which training reads the same samples, or as tars of compressed audio."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """Output of titan-tts prepare, or shards as in [data] path."""

    out: Annotated[Positional[str], arg(metavar="OUT")]
    """Folder to write; the same command again writes only what is missing."""

    to: Literal["parquet", "audio-tars"]
    """Parquet files of latents, or tars of KEY.mp3 (or KEY.flac) and KEY.json."""

    references: Literal["keep", "drop"] = "keep"
    """Whether Parquet files have the stored references; drop is for [data] references = "drawn"."""

    audio: Literal["mp3", "flac"] = "mp3"
    """Audio of the tars: mp3 of 64 kb/s, or flac of 16 bits."""

    codec: str = ""
    """Codec that decodes for audio tars; empty: the one in prepare.json."""

    device: str = "auto"
    """Device of the codec: auto, cpu, cuda, or a list such as cuda:0,cuda:1."""

    workers: int = 0
    """Processes; 0: one per core or GPU."""


def run(options: Options) -> int:
    require_modules(*(("pyarrow",) if options.to == "parquet" else ("av", "soundfile")))
    from titan_tts.share.export_data import export_data

    written = export_data(options)
    show(
        f"{options.out} is complete: {written['files']} files, {written['bytes'] / 1e9:.3f} GB, {written['samples']} "
        f"samples; {written['new']} files written now"
    )
    if written["left_out"]:
        show(f"left out of the samples' JSON as private: {', '.join(written['left_out'])}")
    if options.to == "parquet":
        train = f"{options.out}/train" if "train" in written["folders"] else options.out
        show(f"train on it:  titan-tts train CONFIG --data.path {train}")
    show(f"publish it:   titan-tts data push {options.out} OWNER/NAME")
    return 0
