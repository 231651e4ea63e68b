"""`titan-tts convert`: another project's weights as an exported folder, which every command takes, and back."""

from pathlib import Path

from titan_tts.convert.options import Options
from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.files import check_writable


def run(options: Options) -> int:
    out = Path(options.out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"OUT = {out} exists already; give a new folder")
    require(
        not (options.to and (options.codec or options.tokenizer)),
        "--codec and --tokenizer are for a model of another project; leave them out with --to",
    )
    check_writable(out / "config.json", "OUT")
    from titan_tts.convert.convert import convert, convert_back

    show(convert_back(options, out) if options.to else convert(options, out))
    return 0
