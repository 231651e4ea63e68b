"""The pretrained text encoder of a run: what it is is kept in the run's folder, and then what counts."""

import json
from pathlib import Path
from typing import Any

import torch

from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.text.hf_encoder import CONFIG_FILE, HFEncoderSpec, find_source
from torchtitan.models.dit_tts.text.hf_files import fetch_weights
from torchtitan.models.dit_tts.text.text_encoder import (
    PretrainedTextEncoder,
    load_text_encoder,
)


def read_record(folder: Path) -> dict[str, Any] | None:
    """What `write_record` wrote into a run's folder; None without it.

    Raises:
        InputError: a file that cannot be read.
    """
    path = folder / CONFIG_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); restore the file that the run wrote"
        ) from error


def write_record(folder: Path, source: HFEncoderSpec, encoder: Encoder, fingerprint: str) -> None:
    """Keeps an encoder's name, config and fingerprint; the last is empty for a trained one, whose
    weights are the checkpoint's."""
    record = {
        "model": source.model,
        "frozen": encoder.frozen,
        "dtype": encoder.dtype if encoder.frozen else "",
        "fingerprint": fingerprint,
        "config": source.config.to_dict(),
    }
    with atomic_file(folder / CONFIG_FILE) as file:
        file.write((json.dumps(record, indent=2) + "\n").encode("utf-8"))


def check_fingerprint(folder: Path, encoder: Encoder, fingerprint: str) -> None:
    """Raises InputError where a run's weights know the features of another frozen encoder.

    Args:
        folder: that of the run that trained the weights; one without a record passes.
        fingerprint: of the encoder that is there now.
    """
    record = read_record(folder)
    if record is None or not (record["frozen"] and encoder.frozen):
        return
    for name, had, now in (
        ("dtype", record["dtype"], encoder.dtype),
        ("weights", record["fingerprint"], fingerprint),
    ):
        if had != now:
            raise InputError(
                f"[encoder] model = {encoder.model!r}: the run in {folder} was trained with its "
                f"{name} {had}, and now they are {now}; restore the encoder that the run had"
            )


def check_mode(
    folder: Path, source: HFEncoderSpec, encoder: Encoder, resumes: bool, model_only: bool
) -> bool:
    """Whether a run's weights, about to be loaded, lack the text encoder that is now trained.

    Args:
        folder: that of the run that trained the weights.
        resumes: it is the run that goes on, not another one's weights that a new run starts from.
        model_only: the model is loaded, without optimizer and averaged weights.

    Raises:
        InputError: the encoder cannot be frozen, or trained, from these weights on.
    """
    record = read_record(folder)
    if record is None or record["frozen"] == encoder.frozen:
        return False
    if resumes:
        raise InputError(
            f"[encoder] frozen = {str(encoder.frozen).lower()}, but the run in {folder} has trained "
            f"with {str(record['frozen']).lower()}; set it back, or start a new [job] experiment with "
            f"[checkpoint] initial_load_path in that folder"
        )
    if encoder.frozen:
        raise InputError(
            f"[encoder] frozen = true, but the run in {folder} has trained its text encoder, and its "
            f"model knows the features of that one; set frozen = false"
        )
    if not model_only:
        raise InputError(
            f"[encoder] frozen = false from weights of the run in {folder}, where it was frozen: "
            f"optimizer and averages know nothing of it; set [checkpoint] initial_load_model_only = true"
        )
    if source.fingerprint(record["dtype"]) != record["fingerprint"]:
        raise InputError(
            f"[encoder] model = {encoder.model!r} is not the encoder that the run in {folder} was "
            f"trained with; restore it"
        )
    return True


def load_run_encoder(
    folder: Path, encoder: Encoder, device: torch.device | str
) -> PretrainedTextEncoder:
    """The frozen encoder of the trained run in `folder`.

    Raises:
        InputError: it cannot be loaded, or is not the one that the run was trained with.
    """
    source = find_source(encoder.model, folder=folder)
    fetch_weights(source.model)
    check_fingerprint(folder, encoder, source.fingerprint(encoder.dtype))
    return load_text_encoder(encoder, device, folder)
