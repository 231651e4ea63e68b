"""`titan-tts export`: writes a trained model to a folder that needs neither the run nor its data."""

from titan_tts.export.options import Options
from torchtitan.models.dit_tts.errors import require, show
from torchtitan.models.dit_tts.files import new_folder_path


def run(options: Options) -> int:
    out = new_folder_path(options.out, "OUT")
    require(options.onnx or options.dtype != "int8", "--dtype = int8 is for --onnx; add that")
    licensed = options.license != Options.license  # in the model card
    if options.onnx:
        right = options.dtype != "bfloat16" and not (options.adapter or licensed)
        why = "--onnx is written with --dtype float32 or int8, and without --adapter and --license"
        require(right, why)
        from titan_tts.export.onnx_export import export_onnx

        show(export_onnx(options, out))
        return 0
    unused = options.voices or options.dtype != Options.dtype or licensed
    require(
        not (options.adapter and unused),
        "--adapter writes what was trained alone, without --voices, --dtype and --license; leave these out",
    )
    from titan_tts.export.exporter import export

    show(export(options, out))
    return 0
