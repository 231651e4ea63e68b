"""An exported folder: a trained model with all that it speaks with, and nothing of its training.

    config.json          step, weights, codec, default voice, treatment of references, and the keys of the run's config that are marked EXPORTED
    model.safetensors    weights under the model's names
    manifest.json        size and XXH3 of every file that is read, and what the weights were trained with
    tokenizer.json       the run's, as are text_tokenizer.json and text_encoder.json of a pretrained encoder
    text_encoder/        a frozen encoder that the run had from a folder
    codec/               mel_dct_stats.json and a vocoder of the user's, or weights.safetensors of a DAC-VAE from a file
    aligner.npz          the run's: where in the speech each character is to be expected
    durations.json       how long a text takes, by the fit on the training data
    duration/            a trained predictor of that, as an exported folder of its own
    voices/              voices.safetensors: references of speakers who were chosen
    fine_tune.toml       config of a run that starts from it: what must be the same, and how it was trained
    README.md            the model card, for its author to edit

It may come from a stranger: nothing in it is code, and its config has only the keys marked EXPORTED.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.codec_name import STATISTICS_NAME, VOCODERS, split_vocoder
from torchtitan.models.dit_tts.config.job_config import Checkpoint, JobConfig, Samples
from torchtitan.models.dit_tts.config.keys import marked
from torchtitan.models.dit_tts.config.marks import EXPORTED, RECIPE, Mark
from torchtitan.models.dit_tts.config.old_keys import changes_nothing
from torchtitan.models.dit_tts.config.validation_figures import measured_figures
from torchtitan.models.dit_tts.errors import InputError, reading

FORMAT, VERSION = "titan-tts", 1

CONFIG, WEIGHTS = "config.json", "model.safetensors"
CARD, FINE_TUNE = "README.md", "fine_tune.toml"
MEL_DCT, DAC_VAE = f"codec/{STATISTICS_NAME}", "codec/weights.safetensors"
OWN_VOCODER = "codec/vocoder.safetensors"
DURATIONS = "duration"
VOICES = "voices/voices.safetensors"
TEXT_ENCODER = "text_encoder"

_ALWAYS_READ = (CONFIG, WEIGHTS, "tokenizer.json")
READ = (
    *_ALWAYS_READ,
    *("text_tokenizer.json", "text_encoder.json", "durations.json", "aligner.npz"),
    *(MEL_DCT, OWN_VOCODER, DAC_VAE, VOICES),
)
"""Files that are read, in addition to TEXT_ENCODER, and to DURATIONS, which has its own manifest"""

_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".distcp")


def kept(config: JobConfig, *marks: Mark) -> dict[str, dict[str, Any]]:
    """The keys of a run's config that its model needs, and those that have one of the marks."""
    values = asdict(config)
    found: dict[str, dict[str, Any]] = {}
    for name in marked(EXPORTED, *marks):
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = values[section][key]
    return found


def fine_tune_config(config: JobConfig, codec: str, encoder: str) -> dict[str, dict[str, Any]]:
    """fine_tune.toml of a run: what must be the same, and how it was trained.

    Args:
        codec: what the run's is called everywhere; empty for a file.
        encoder: the same of its text encoder.
    """
    found = kept(config, RECIPE)
    found["encoder"]["model"] = encoder
    del found["encoder"]["vocab_size"]  # new data may bring more ids
    found["sampling"]["codec"] = codec
    if not codec:
        del found["sampling"]["codec"]
    if config.objective.loss_on_padding:  # rows of one length, as it was trained
        found["data"]["bucket_frames"] = [config.data.max_frames]
    # Figures of speech need what listens, which a folder does not name.
    if config.validation.keep_best not in measured_figures(replace(config, samples=Samples())):
        del found["validation"]["keep_best"]
    return found


def is_exported(folder: str | os.PathLike) -> bool:
    """True if a folder is an exported one, by its files' names alone."""
    return Path(folder, CONFIG).is_file() and Path(folder, WEIGHTS).is_file()


def files_read(folder: Path) -> list[str]:
    """Files that a manifest must list: every export's, and others that exist and are read."""
    found = {name for name in READ if (folder / name).exists()}
    encoder = {f"{TEXT_ENCODER}/{path.name}" for path in folder.glob(f"{TEXT_ENCODER}/[!.]*")}
    return sorted({*_ALWAYS_READ, *found, *encoder})


def refuse_pickles(folder: Path) -> None:
    """Raises InputError for a folder whose weights are pickles, which can run code when they are read."""
    files = folder.iterdir() if folder.is_dir() else [folder]
    found = sorted(p.name for p in files if p.suffix in _PICKLES and p.is_file())
    if found:
        raise InputError(
            f"{folder} has its weights in {found[0]}, a pickle, which can run code when it is read; only "
            f"{WEIGHTS} of titan-tts export is read"
        )


def read_exported(folder: Path) -> dict[str, Any]:
    """config.json of an exported folder: format, version, step, weights, codec, audio, config, and voice, the
    default one, where the folder has voices."""
    path = folder / CONFIG
    with reading(path, "export the run again"):
        content = read_json_file(path)
    is_object = isinstance(content, dict)
    found = (content.get("format"), content.get("version")) if is_object else None
    if found != (FORMAT, VERSION):
        raise InputError(
            f"{path} is not of titan-tts export, version {VERSION}; give a folder that it wrote"
        )
    known = {*marked(EXPORTED)}
    try:
        for name in ("kind", "name", "fingerprint"):
            assert isinstance(content["codec"][name], str)
        assert isinstance(content["step"], int) and isinstance(content["weights"], str)
        assert isinstance(content["audio"], dict)
        assert isinstance(content.get("voice", ""), str)
        for section, values in content["config"].items():
            assert isinstance(values, dict)
            for key, value in values.items():
                name = f"{section}.{key}"
                assert name in known or changes_nothing(name, value)
    except (KeyError, TypeError, AttributeError, AssertionError):
        raise InputError(
            f"{path} was changed since titan-tts export wrote it; export the run again"
        ) from None
    return content


def placed_config(folder: Path) -> dict[str, dict[str, Any]]:
    """The config of config.json, which points to what lies in its folder, wherever that is now. The folder
    itself stands for the training data: `recorded_codecs` and `open_speech_data` find there what they
    need.
    """
    content, folder = read_exported(folder), folder.resolve()
    found: dict[str, dict[str, Any]] = {name: {} for name in kept(JobConfig())} | content["config"]
    found["data"]["path"] = str(folder)
    inside = {"mel_dct": MEL_DCT, "dac_vae": DAC_VAE}.get(content["codec"]["kind"], "")
    within = inside and (folder / inside).is_file()
    name = content["codec"]["name"]
    found["sampling"]["codec"] = str(folder / inside) if within else name
    if inside == MEL_DCT and (folder / OWN_VOCODER).is_file():
        found["sampling"]["codec"] += f"+{folder / OWN_VOCODER}"
    elif within and (vocoder := split_vocoder(name)[1]) in VOCODERS.values():
        found["sampling"]["codec"] += f"+{vocoder}"
    if (folder / TEXT_ENCODER).is_dir():
        found["encoder"]["model"] = str(folder / TEXT_ENCODER)
    return found


def check_initial_weights(checkpoint: Checkpoint) -> None:
    """Raises InputError where initial_load_path is neither one checkpoint nor an exported folder."""
    path = Path(checkpoint.initial_load_path or "")
    key = f"[checkpoint] initial_load_path = {checkpoint.initial_load_path!r}"
    if not path.is_dir():
        raise InputError(
            f"{key} is not a folder; give the folder of one checkpoint, for example "
            f"outputs/NAME/checkpoint/step-1000, or one that titan-tts export wrote"
        )
    if is_exported(path):
        read_exported(path)
        if not checkpoint.initial_load_model_only:
            raise InputError(
                f"{key} is an exported folder, which has no optimizer state and no averages; set "
                f"initial_load_model_only = true"
            )
    elif not (path / ".metadata").is_file():
        refuse_pickles(path)
        below = sorted(path.glob("**/step-*/.metadata"), key=lambda each: each.stat().st_mtime)
        where = f"such as {below[-1].parent}" if below else "outputs/NAME/checkpoint/step-N"
        raise InputError(
            f"{key} holds no weights; give the folder of one checkpoint, {where}, or one that "
            f"titan-tts export wrote"
        )
