"""Writes the files of an exported folder; `config.exported` has their names."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save

from titan_tts.export.options import Options
from titan_tts.report.words import counted
from titan_tts.speak.adapters import write_adapter
from titan_tts.speak.lengths import find_predictor, load_predictor
from titan_tts.speak.load_run import LoadedRun, load_run
from titan_tts.speak.speech_data import TrainingShards, open_speech_data
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.codec_name import VOCODERS, split_vocoder
from torchtitan.models.dit_tts.config.job_config import is_pretrained
from torchtitan.models.dit_tts.config.manager import without_none
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.config.trust import refuse_function_as_codec
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import save_weights, sync_folder, sync_tree, write_atomic
from torchtitan.models.dit_tts.run.manifest import read_manifest, write_manifest
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec, codec_kind
from torchtitan.models.dit_tts.speech.codec.interface import OWN, WITHOUT_WEIGHTS
from torchtitan.models.dit_tts.speech.codec.record import check_codec, recorded_codecs
from torchtitan.models.dit_tts.text.build_tokenizer import TEXT_TOKENIZER_FILE, TOKENIZER_FILE
from torchtitan.models.dit_tts.text.durations import DURATIONS_FILE
from torchtitan.models.dit_tts.text.encoder_record import CONFIG_FILE, read_record
from torchtitan.models.dit_tts.text.hf_encoder import weight_files
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary, language_of, named, to_json

_SHOWN = 12
_MANY_SPEAKERS = 100
"""Fewer are too few for voices that were not trained: measured for three and four, a rule of thumb beyond"""

_FILL_IN = "**to fill in**"


def export(options: Options, out: Path) -> str:
    """Writes the folder, a new or an empty one: complete under its name, or not at all. Returns a report."""
    folder = Path(shipped_path(options.run))
    if exported.is_exported(folder):
        raise InputError(f"{folder} is an exported folder already; give the run folder")
    phones = language_of(options.encoder)
    require(not phones, f"--encoder phones:{phones} is for speaking; give it to what speaks")
    loaded = load_run(folder, options.step, options.weights, options.encoder)
    config, base = loaded.config, Path(str(loaded.config.checkpoint.initial_load_path))
    if options.adapter and (loaded.adapter is None or not exported.is_exported(base)):
        raise InputError(
            f"--adapter, but {folder} is not an adapter's run over an exported folder; leave --adapter out, which exports all "
            "weights"
        )
    if not options.codec:
        refuse_function_as_codec(config.sampling.codec, options.run, "--codec")
    codec = build_codec(options.codec or config.sampling.codec)
    check_codec(codec, config.data.path)
    shards = open_speech_data(folder, config, options.data)
    assert isinstance(shards, TrainingShards)
    with new_folder(out) as temporary:
        if options.adapter and loaded.adapter is not None:
            about = {"step": loaded.step, "weights": loaded.weights}
            write_adapter(temporary, config.lora, loaded.adapter, base, about, loaded.model)
        else:
            _write(options, temporary, loaded, codec, shards)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    report = f"{out}: step {loaded.step} ({loaded.weights}) of {folder}, {size / 2**20:.1f} MiB"
    if options.adapter:
        return f"{report}; speak: titan-tts serve {base} --voice NAME={out},RECORDING.wav"
    return f"{report}; fill in the licences in {out / exported.CARD}"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that appears as `out` when it is complete."""
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_tree(temporary)
        try:
            os.rename(temporary, out)
        except OSError as error:
            written = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            require(not written, f"OUT = {out} was written meanwhile by another command; it stays")
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(out.parent)


def _write(
    options: Options, out: Path, loaded: LoadedRun, codec: Codec, shards: TrainingShards
) -> None:
    config = loaded.config
    write_atomic(out / DURATIONS_FILE, shards.durations.to_json())
    write_codec(out, codec, options.codec or config.sampling.codec)
    limit = config.data.max_speaker_frames
    voices = {name: shards.reference(name)[:limit].float() for name in options.voices}
    if voices:
        write_atomic(out / exported.VOICES, save(voices))
    audio = next((record.audio for record in recorded_codecs(shards.data.path)), {})
    about: dict[str, Any] = {
        "codec": about_codec(codec),
        "audio": {name: audio[name] for name in ("loudness", "max_silence") if name in audio},
    }
    codec_name = about["codec"]["name"]
    default = {"voice": options.voices[0]} if options.voices else {}
    kept = _write_model(out, loaded, about | default, options.dtype)
    fine_tune = exported.fine_tune_config(config, codec_name, kept["encoder"]["model"])
    write_atomic(out / exported.FINE_TUNE, tomli_w.dumps(without_none(fine_tune)))
    predictor = find_predictor(loaded.folder, config, options.duration)
    if predictor is not None:
        (out / exported.DURATIONS).mkdir()
        timing = load_predictor(predictor, config, options.encoder)
        _write_model(out / exported.DURATIONS, timing, about, options.dtype)
    write_atomic(out / exported.CARD, model_card(options, loaded, codec, shards))


def _write_model(
    out: Path, loaded: LoadedRun, about: dict[str, Any], dtype: str
) -> dict[str, dict[str, Any]]:
    """Writes weights, tokenizer, text encoder, config.json and manifest of a model that speaks or predicts lengths.
    Returns the part of the run's config that config.json has. `about`: its further entries."""
    config = loaded.config
    precision = torch.float32 if dtype == "float32" else torch.bfloat16
    parameters = loaded.model.named_parameters()
    tensors = {name: p.detach().to("cpu", precision).contiguous() for name, p in parameters}
    save_weights(tensors, out / exported.WEIGHTS, {"format": "pt"})
    kept, vocabulary = exported.kept(config), loaded.tokenizer.vocabulary
    if is_pretrained(config.encoder.model):
        _write_text_encoder(out, loaded, kept["encoder"])
        assert vocabulary.subwords is not None
        named = replace(vocabulary.subwords, model=kept["encoder"]["model"])
        vocabulary = replace(vocabulary, subwords=named)
    elif vocabulary.subwords:
        shutil.copyfile(loaded.folder / TEXT_TOKENIZER_FILE, out / TEXT_TOKENIZER_FILE)
    if loaded.tokenizer.aligner is not None:
        loaded.tokenizer.aligner.save(out)
    checkpoint = loaded.folder / config.checkpoint.folder / f"step-{loaded.step}"
    about = {"step": loaded.step, "weights": loaded.weights, **about}
    write_description(out, kept, vocabulary, about, read_manifest(checkpoint)["trained_with"])
    return kept


def write_description(
    out: Path,
    kept: dict[str, dict[str, Any]],
    vocabulary: Vocabulary,
    about: dict[str, Any],
    trained_with: dict[str, Any],
) -> None:
    """Writes tokenizer.json, config.json of `kept` (by `exported.kept`) and `about`, and the manifest of all files
    that are there."""
    write_atomic(out / TOKENIZER_FILE, to_json(vocabulary))
    kept["sampling"].pop("codec")
    content = {"format": exported.FORMAT, "version": exported.VERSION, **about, "config": kept}
    write_atomic(out / exported.CONFIG, json.dumps(content, indent=1) + "\n")
    write_manifest(out, exported.files_read(out), trained_with)


def about_codec(codec: Codec) -> dict[str, Any]:
    """The codec's entry of config.json."""
    kind = codec_kind(codec.name)
    # The path of a file is not given away, and a folder names no function to call.
    named = kind != OWN and not Path(codec.name).is_absolute()
    return {
        "kind": kind,
        "name": codec.name if named else "",
        "fingerprint": codec.fingerprint,
        "sample_rate": codec.sample_rate,
        "hop_length": codec.hop_length,
    }


def write_codec(out: Path, codec: Codec, built_by: str) -> None:
    """Writes mel_dct's constants and a vocoder of the user's, or the weights of a codec that is a local file."""
    if codec_kind(codec.name) == "mel_dct":
        from torchtitan.models.dit_tts.speech.codec.mel_dct import STATISTICS_FILE

        constants, vocoder = split_vocoder(built_by)
        source = STATISTICS_FILE if constants == "mel_dct" else Path(constants)
        write_atomic(out / exported.MEL_DCT, source.read_bytes())
        if vocoder not in ("", *VOCODERS.values()):
            write_atomic(out / exported.OWN_VOCODER, Path(vocoder).expanduser().read_bytes())
    if not Path(codec.name).is_absolute():
        return
    from torchtitan.models.dit_tts.speech.codec.dac_vae import DacVaeCodec
    from torchtitan.models.dit_tts.speech.codec.dac_vae_weights import write_safetensors

    assert isinstance(codec, DacVaeCodec)
    write_safetensors(codec.network, out / exported.DAC_VAE)


def _write_text_encoder(out: Path, loaded: LoadedRun, kept: dict[str, Any]) -> None:
    """Writes tokenizer and record of a pretrained encoder, and the weights of a frozen one from a local folder,
    whose name replaces the path in the record and in `kept`, the config's section."""
    folder, frozen = loaded.folder, loaded.text_encoder
    shutil.copyfile(folder / TEXT_TOKENIZER_FILE, out / TEXT_TOKENIZER_FILE)
    record = read_record(folder)
    if record is None:
        raise InputError(f"{folder / CONFIG_FILE} is missing; restore the file that the run wrote")
    name = loaded.config.encoder.model if frozen is None else frozen.source.model
    if frozen is not None and os.path.isdir(name):
        (out / exported.TEXT_ENCODER).mkdir()
        for path in safe_files(Path(name)):
            shutil.copyfile(path, out / exported.TEXT_ENCODER / path.name)
        name = exported.TEXT_ENCODER
    kept["model"] = record["model"] = Path(name).name if os.path.isabs(name) else name
    write_atomic(out / CONFIG_FILE, json.dumps(record, indent=2) + "\n")


def safe_files(model: Path) -> list[Path]:
    """Config and weights of a frozen encoder's folder. Raises InputError if the weights are pickles."""
    weights = weight_files(str(model))
    if any(path.suffix != ".safetensors" for path in weights):
        raise InputError(
            f"[encoder] model = '{model}' has its weights in a pickle, which is not exported; save the model "
            f"as safetensors, or train with its hub name"
        )
    return [*weights, *model.glob("*.safetensors.index.json"), model / "config.json"]


def model_card(options: Options, loaded: LoadedRun, codec: Codec, shards: TrainingShards) -> str:
    """Markdown with the metadata that the hub reads, without paths but their last two names."""
    data = loaded.config.data
    name = Path(options.out).resolve().name
    parameters = sum(p.numel() for p in loaded.model.parameters())
    dataset = shards.dataset
    hours = float(dataset.frames.sum()) / data.frames_per_second / 3600
    speakers, languages = (dataset.labels(each)[1] for each in ("speaker", "language"))
    figures = {
        "parameters": f"{parameters:,}",
        "training steps": f"{loaded.step:,}",
        "weights": loaded.weights,
        "training data": f"{hours:.1f} h in {len(dataset):,} utterances",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    paths = [shards.data.path] if isinstance(shards.data.path, str) else shards.data.path
    encoder = loaded.config.encoder.model
    unit, _, language = encoder.partition(":")
    texts = {
        "chars": f"the characters {loaded.tokenizer.vocabulary.characters!r}",
        "bytes": "any, as utf-8 bytes",
        "phones": f"as the phones that espeak-ng has for its language {language}",
    }
    without_weights = codec.name in WITHOUT_WEIGHTS
    codec_is = "fixed transform, no weights" if without_weights else "DAC-VAE"
    if split_vocoder(codec.name)[1]:
        codec_is = "fixed transform, and a vocoder with weights"
    # transformers' text encoders and DAC-VAE; a base of phones needs neither.
    needs_more = is_pretrained(encoder) or codec_kind(codec.name) == "dac_vae"
    extras = f"speech{',pretrained' if needs_more else ''}"
    voice = f"--speaker {options.voices[0]}" if options.voices else "--reference voice.wav"
    return f"""---
license: {options.license}
library_name: titan-tts
pipeline_tag: text-to-speech
tags: [text-to-speech, flow-matching, diffusion-transformer]
---

# {name}

A diffusion transformer ({loaded.config.model.flavor}) that turns text and a reference of a voice into latents of the codec
`{codec.name if not Path(codec.name).is_absolute() else "DAC-VAE"}` ({codec.frames_per_second:g} frames per second, {codec.sample_rate} Hz), trained by flow matching with
titan-tts.

```bash
pip wheel --no-deps --wheel-dir dist .    # in a checkout of titan-tts, which is not on PyPI
pip install "$(ls dist/titan_tts-*.whl)[{extras}]"
titan-tts generate {name} {voice} --text "..." --out speech.wav
```

| | |
|---|---|
{table}

## What it can say

| | |
|---|---|
| text | {texts.get(unit, "as its text encoder reads it")}; only texts similar to the training data sound well |
| voices | {whose_voices(speakers)} |
| languages | {named(sorted(languages), _SHOWN) if languages else _FILL_IN} |
| conditioning tokens | {", ".join(loaded.tokenizer.fields) or "none"} |
| captions | {f"the voice in up to {data.max_caption_tokens} tokens: `--caption`" if data.max_caption_tokens else "none"} |

## Data and licences

| | what | licence |
|---|---|---|
| weights | `model.safetensors` | {options.license if options.license != "unknown" else _FILL_IN} |
| training data | {", ".join(f"`{_short(path)}`" for path in paths)} | {_FILL_IN} |
| codec | {codec_is} | {"none needed" if without_weights else _FILL_IN} |

Whose voices it was trained on, and what they agreed to: {_FILL_IN}.
"""


def whose_voices(speakers: Sequence[str]) -> str:
    """Whose voice the model can take; `speakers`: those of its training data."""
    if not speakers:
        return "of a reference, if its training data, which name no speakers, had many"
    known = f"of its {counted(len(speakers), 'speaker')}: {named(sorted(speakers), _SHOWN)}"
    if len(speakers) >= _MANY_SPEAKERS:
        return f"{known}; others from a reference"
    return f"{known}; too few to take another voice from a reference"


def _short(path: str) -> str:
    """The last two names of a path or URL."""
    return "/".join(Path(path.partition("?")[0]).parts[-2:]).lstrip("/")
