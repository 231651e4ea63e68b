"""`titan-tts data export`: shards as Parquet files for other tools, or as tars of compressed audio."""

from titan_tts.share.options import Options
from torchtitan.models.dit_tts.errors import require_modules, show


def run(options: Options) -> int:
    require_modules(*(("pyarrow",) if options.to == "parquet" else ("av", "soundfile")))
    from titan_tts.share.export_data import export_data

    show(export_data(options))
    if options.to == "parquet":
        show(f"shards again: titan-tts prepare {options.out} DATA --format table")
    show(f"publish it:   titan-tts data push {options.out} OWNER/NAME")
    return 0
