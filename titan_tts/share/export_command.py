"""`titan-tts data export`: shards as Parquet files for other tools, or as tars of compressed audio."""

from titan_tts.share.options import ExportOptions as Options
from torchtitan.models.dit_tts.errors import require_modules, show


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
        show(f"shards again: titan-tts prepare {options.out} DATA --format table")
    show(f"publish it:   titan-tts data push {options.out} OWNER/NAME")
    return 0
