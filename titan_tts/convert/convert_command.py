"""`titan-tts convert`: another project's weights as an exported folder, which every command takes, and back."""

from titan_tts.convert.options import Options
from torchtitan.models.dit_tts.errors import require, show
from torchtitan.models.dit_tts.files import new_folder_path


def run(options: Options) -> int:
    out = new_folder_path(options.out, "OUT")
    require(
        not (options.to and (options.codec or options.tokenizer)),
        "--codec and --tokenizer are for a model of another project; leave them out with --to",
    )
    from titan_tts.convert.convert import convert, convert_back

    show(convert_back(options, out) if options.to else convert(options, out))
    return 0
