"""`titan-tts data export`: shards as Parquet files for other tools, or as tars of compressed audio."""

import shlex

from titan_tts.share.options import Options
from torchtitan.models.dit_tts.errors import require_modules, show


def run(options: Options) -> int:
    require_modules(*(("pyarrow",) if options.to == "parquet" else ("av", "soundfile")))
    from titan_tts.share.export_data import export_data

    show(export_data(options))
    layout = "table" if options.to == "parquet" else "webdataset"
    again = ["titan-tts", "prepare", options.out, "DATA", "--format", layout]
    show(f"shards again: {shlex.join(again)}")
    upload = ["hf", "upload", "OWNER/NAME", options.out, ".", "--repo-type", "dataset", "--private"]
    show(f"publish it:   {shlex.join(upload)}")
    return 0
