"""`titan-tts export`: writes a trained model to a folder that needs neither the run nor its data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from titan_tts.speak.sampling_options import ModelOptions
from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.files import check_writable


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Write a trained model to a folder that needs neither its run nor its data, and publish it."""

    run: tyro.conf.Positional[str]
    """The run's folder, outputs/NAME."""

    out: tyro.conf.Positional[str]
    """Folder to write, a new or an empty one."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of model.safetensors: as trained, or half its size."""

    voices: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """A speaker of the training shards whose reference is exported, too, for --speaker; may be repeated."""

    adapter: bool = False
    """Write what an adapter's run has trained alone, some megabytes that `titan-tts serve --voice` adds to its base."""

    license: str = "unknown"
    """Licence of the weights for the model card, such as apache-2.0."""

    push: str = ""
    """OWNER/NAME of a repository of the Hugging Face hub, to upload the folder to."""

    private: bool = False
    """Make the repository private if --push creates it."""


def run(options: Options) -> int:
    out = Path(options.out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"OUT = {out} exists already; give a new folder")
    check_writable(out / "config.json", "OUT")
    unused = options.voices or options.push or options.dtype != Options.dtype
    require(
        not (options.adapter and unused),
        "--adapter writes what was trained alone, without --voices, --dtype and --push; leave these out",
    )
    from titan_tts.export.exporter import export
    from titan_tts.speak.hub import FILES, is_hub_name, upload_folder

    if options.push and not is_hub_name(options.push):
        raise InputError(f"--push = {options.push}, but a repository's name is OWNER/NAME")
    show(export(options, out))
    if options.push:
        show(upload_folder(out, options.push, FILES, options.private, "titan-tts export"))
    return 0
