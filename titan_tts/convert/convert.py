"""Writes a converted folder, complete under its name or not at all, and reads one to convert it back."""

from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_tts.convert.layout import conversion_table, to_ours, to_theirs
from titan_tts.convert.options import Options
from titan_tts.convert.projects import ECHO, PROJECTS, Project, check_is_of, config_of, sizes_of
from titan_tts.export.exporter import about_codec, new_folder, write_codec, write_description
from titan_tts.speak.hub import is_hub_name
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_run_config, without_none
from torchtitan.models.dit_tts.errors import InputError, first_line, require
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig, model_flavors
from torchtitan.models.dit_tts.run.checkpoint_storage import verify
from torchtitan.models.dit_tts.run.resume_rules import trained_with
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.text.build_tokenizer import load_vocabulary
from torchtitan.models.dit_tts.text.durations import DURATIONS_FILE, LinearDurationModel
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary


def convert(options: Options, out: Path) -> str:
    """Writes an exported folder of another project's weights. Returns a report."""
    path = _find(options.source)
    weights, project = _read(path), ECHO
    left_out = [name for name in weights if any(part in f".{name}" for part in project.left_out)]
    for name in left_out:
        del weights[name]
    args = sizes_of(weights, project, path)
    codec = _codec_of(options, project, args)
    config = config_of(args, project)
    config.data.frames_per_second = codec.frames_per_second
    vocabulary = Vocabulary(convention=project.convention)
    config.encoder.vocab_size = vocabulary.size
    model = _on_meta(config)
    ours = to_ours(conversion_table(model, project is ECHO), model, weights, path)
    with new_folder(out) as folder:
        save_file(ours, folder / exported.WEIGHTS, {"format": "pt"})
        _describe(folder, options, project, config, codec, vocabulary)
    count = sum(value.numel() for value in ours.values())
    dropped = (
        f"; {len(left_out)} tensors that only generation block by block has are left out"
        if left_out
        else ""
    )
    return f"{out}: {project.name}, {count:,} parameters{dropped}"


def convert_back(options: Options, out: Path) -> str:
    """Writes an exported folder in another project's layout. Returns a report."""
    folder, project = Path(options.source), PROJECTS[options.to]
    if not exported.is_exported(folder):
        raise InputError(
            f"{folder} is no exported folder; give one that titan-tts convert wrote, or titan-tts export of a run that "
            f"began with it"
        )
    if problem := verify(folder):
        raise InputError(f"{problem}; copy the folder again")
    config, vocabulary = load_run_config(folder), load_vocabulary(folder)
    config.encoder.vocab_size = vocabulary.size
    args = model_flavors()[config.model.flavor]
    args.update_from_config(config)
    check_is_of(config, args, project, folder)
    table = conversion_table(_on_meta(config), project is ECHO)
    theirs = to_theirs(table, _read(folder / exported.WEIGHTS), folder)
    with new_folder(out) as new:
        save_file(theirs, new / project.file, {"format": "pt"})
    return f"{out / project.file}: {len(theirs)} tensors in the layout of {project.name}"


def _on_meta(config: JobConfig) -> DiTTTSModel:
    args = model_flavors()[config.model.flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        return DiTTTSModel(args)


def _find(source: str) -> Path:
    """The file of weights."""
    path = Path(source)
    if path.is_dir():
        found = [path / each.file for each in PROJECTS.values() if (path / each.file).is_file()]
        if not found:
            exported.refuse_pickles(path)
            names = ", ".join(each.file for each in PROJECTS.values())
            raise InputError(f"{path} has none of {names}; give the file of weights")
        return found[0]
    if path.suffix == ".safetensors" or path.exists() or not is_hub_name(source):
        require(path.is_file(), f"{source} is neither a file nor a folder nor a hub name")
        exported.refuse_pickles(path)
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for project in PROJECTS.values():
        try:
            return Path(hf_hub_download(source, project.file))
        except EntryNotFoundError:
            continue
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{source} is not a folder, and cannot be downloaded from the hub ({first_line(error)}); download it "
                f"elsewhere and give the file's path"
            ) from None
    raise InputError(
        f"{source} has no weights that are known; give the name of a model of Echo-TTS"
    )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}); copy it again") from None


def _codec_of(options: Options, project: Project, args: DiTTTSModelConfig) -> Codec:
    name = options.codec
    require(
        bool(name),
        f"--codec is not given, and {project.name}'s is not part of this program; give package.module:factory, a function "
        f"of yours that makes it (docs/convert.md has one)",
    )
    codec = build_codec(name)
    require(
        codec.latent_channels == args.latent_channels,
        f"--codec = {name} has latents of {codec.latent_channels} channels, and the model of {args.latent_channels}; give "
        f"the model's codec",
    )
    return codec


def _describe(
    folder: Path,
    options: Options,
    project: Project,
    config: JobConfig,
    codec: Codec,
    vocabulary: Vocabulary,
) -> None:
    """Writes everything but the weights."""
    rate = np.full(257, config.data.frames_per_second / project.bytes_per_second)
    rate[-1] = 0.0
    write_atomic(folder / DURATIONS_FILE, LinearDurationModel(rate, {}, 0.0).to_json())
    write_codec(folder, codec, options.codec)
    about: dict[str, Any] = {"step": 0, "weights": "raw", "codec": about_codec(codec), "audio": {}}
    fine_tune = exported.fine_tune_config(config, about["codec"]["name"], config.encoder.model)
    write_atomic(folder / exported.FINE_TUNE, tomli_w.dumps(without_none(fine_tune)))
    card = f"""---
library_name: titan-tts
pipeline_tag: text-to-speech
---

# A model of {project.name}

Converted from `{Path(options.source).name}` by titan-tts convert. The licence of the weights stays: {project.licence}.
"""
    write_atomic(folder / exported.CARD, card)
    write_description(folder, exported.kept(config), vocabulary, about, trained_with(config))
