"""Writes another project's model as an exported folder, and an exported folder in another project's layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor

from titan_tts.convert.layout import conversion_table, to_ours, to_theirs
from titan_tts.convert.options import Options
from titan_tts.convert.projects import (
    ECHO,
    IRODORI,
    PROJECTS,
    Header,
    Project,
    check_is_of,
    config_of,
    entry,
    header_of,
    sizes_of,
)
from titan_tts.export.exporter import about_codec, new_folder, write_codec, write_description
from titan_tts.speak.open_run import find_folder
from torchtitan.models.dit_tts.bounded import parse_json, read_weights
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.job_config import LEARNED_SUBWORDS, JobConfig
from torchtitan.models.dit_tts.config.manager import load_run_config, without_none
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.files import save_weights, write_atomic
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig, model_flavors
from torchtitan.models.dit_tts.run.manifest import verify_files
from torchtitan.models.dit_tts.run.resume_rules import trained_with
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.text.build_tokenizer import TEXT_TOKENIZER_FILE, load_vocabulary
from torchtitan.models.dit_tts.text.durations import DURATIONS_FILE, LinearDurationModel
from torchtitan.models.dit_tts.text.hf_tokenizer import TextTokenizer, load_subword_tokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

_HEADER = "config_json"
"""entry of a safetensors file's header in which Irodori-TTS has its config"""


def convert(options: Options, out: Path) -> str:
    """Writes an exported folder of another project's weights. Returns a report."""
    path = _find(options.source)
    weights, header = _read(path)
    project = IRODORI if header else ECHO
    left_out = [name for name in weights if any(part in f".{name}" for part in project.left_out)]
    for name in left_out:
        del weights[name]
    args = sizes_of(weights, header, project, path)
    config = config_of(args, header, project)
    vocabulary, text = Vocabulary(convention=project.convention), None
    if project is IRODORI:
        rows = len(weights["text_encoder.text_embedding.weight"])
        vocabulary, text = _irodori_texts(options, config, header, rows)
    codec = _codec_of(options, project, args)
    config.data.frames_per_second = codec.frames_per_second
    config.encoder.vocab_size = vocabulary.size
    model = _on_meta(config)[0]
    ours = to_ours(conversion_table(model, project is ECHO), model, weights, path)
    with new_folder(out) as folder:
        save_weights(ours, folder / exported.WEIGHTS, {"format": "pt"})
        if text is not None:
            write_atomic(folder / TEXT_TOKENIZER_FILE, text.to_json())
        _describe(folder, options, project, config, codec, vocabulary)
    parameters = sum(value.numel() for value in ours.values())
    report = f"{out}: {project.name}, {parameters:,} parameters"
    if left_out:
        report += f"; left out are {len(left_out)} tensors of generation block by block"
    return report


def convert_back(options: Options, out: Path) -> str:
    """Writes an exported folder in another project's layout. Returns a report."""
    folder, project = Path(shipped_path(options.source)), PROJECTS[options.to]
    if not exported.is_exported(folder):
        raise InputError(
            f"{folder} is not an exported folder; give one that titan-tts convert wrote"
        )
    if problem := verify_files(folder):
        raise InputError(f"{problem}; copy the folder again")
    config = load_run_config(folder)
    config.encoder.vocab_size = load_vocabulary(folder).size
    model, args = _on_meta(config)
    check_is_of(config, args, project, folder)
    table = conversion_table(model, project is ECHO)
    theirs = to_theirs(table, _read(folder / exported.WEIGHTS)[0], folder)
    header = {"format": "pt"}
    if project is IRODORI:
        header[_HEADER] = json.dumps(header_of(config, args))
    with new_folder(out) as new:
        save_weights(theirs, new / project.file, header)
    return f"{out / project.file}: {len(theirs)} tensors in the layout of {project.name}"


def _on_meta(config: JobConfig) -> tuple[DiTTTSModel, DiTTTSModelConfig]:
    args = model_flavors()[config.model.flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        return DiTTTSModel(args), args


def _find(source: str) -> Path:
    """The file of weights."""
    files = tuple(project.file for project in PROJECTS.values())
    is_there = Path(source).exists() or Path(source).suffix != ".safetensors"
    require(is_there, f"{source} does not exist; give the file of weights")
    path = Path(source) if Path(source).is_file() else find_folder(source, files)
    if exported.is_exported(path):
        raise InputError(f"{source} is an exported folder; give --to echo or --to irodori")
    exported.refuse_pickles(path)
    found = [each for each in (path, *(path / name for name in files)) if each.is_file()]
    require(bool(found), f"{source} has none of {' and '.join(files)}; give the file of weights")
    return found[0]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and Irodori-TTS's config in the header, if there is one."""
    with reading(path):
        weights, texts = read_weights(path)
        header = parse_json(texts.get(_HEADER, "{}"))
        if not isinstance(header, dict):
            raise ValueError(f"its {_HEADER} is not a table")
        return weights, header


def _irodori_texts(
    options: Options, config: JobConfig, header: Header, rows: int
) -> tuple[Vocabulary, TextTokenizer]:
    """Its vocabulary, of as many ids as the embedding has rows, and its tokenizer."""
    require(
        entry(header, "text_add_bos", True),
        "the model's config has text_add_bos = false, which is not supported",
    )
    model = config.encoder.model
    given = f"{LEARNED_SUBWORDS}{options.tokenizer}" if options.tokenizer else model
    found = load_subword_tokenizer(given)
    sizes = f"{given} has ids up to {found.text.end - 1}, but the model's embedding has {rows} rows"
    require(found.text.end <= rows, f"{sizes}; give its tokenizer by --tokenizer")
    assert found.vocabulary.subwords is not None
    subwords = replace(found.vocabulary.subwords, base=rows, model=model)
    convention = config.encoder.convention
    return replace(found.vocabulary, subwords=subwords, convention=convention), found.text


def _codec_of(options: Options, project: Project, args: DiTTTSModelConfig) -> Codec:
    name = options.codec or project.codecs.get(args.latent_channels, "")
    require(
        bool(name),
        f"--codec is not given, and {project.name}'s is not part of this program; give a function that makes it "
        "(docs/convert.md has one)",
    )
    codec = build_codec(name)
    width = f"--codec = {name} has latents of {codec.latent_channels} channels"
    require(
        codec.latent_channels == args.latent_channels,
        f"{width}, but the model's have {args.latent_channels}; give the model's codec",
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
    per_byte = np.full(257, config.data.frames_per_second / project.bytes_per_second)
    per_byte[-1] = 0.0  # the constant
    write_atomic(folder / DURATIONS_FILE, LinearDurationModel(per_byte, {}).to_json())
    write_codec(folder, codec, options.codec)
    about: dict[str, Any] = {"step": 0, "weights": "raw"}
    about |= {"codec": about_codec(codec), "audio": project.audio}
    fine_tune = exported.fine_tune_config(config, about["codec"]["name"], config.encoder.model)
    write_atomic(folder / exported.FINE_TUNE, tomli_w.dumps(without_none(fine_tune)))
    card = f"""---
library_name: titan-tts
pipeline_tag: text-to-speech
---

# A model of {project.name}

Converted from `{Path(options.source).name}` by titan-tts convert. The licence of its weights holds: {project.licence}.
"""
    write_atomic(folder / exported.CARD, card)
    write_description(folder, exported.kept(config), vocabulary, about, trained_with(config))
