"""The record of a run's pretrained text encoder, in the run folder. On resume it wins over the config."""

import json
from pathlib import Path

import torch

from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.text.hf_encoder import (
    CONFIG_FILE,
    HFEncoderSpec,
    find_source,
    read_record,
)
from torchtitan.models.dit_tts.text.hf_files import fetch_weights
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder


def write_record(folder: Path, source: HFEncoderSpec, encoder: Encoder, fingerprint: str) -> None:
    """Stores an encoder's name, config and fingerprint, which is empty for a trained encoder."""
    record = {
        "model": source.model,
        "frozen": encoder.frozen,
        "dtype": encoder.dtype if encoder.frozen else "",
        "fingerprint": fingerprint,
        "config": source.config.to_dict(),
    }
    write_atomic(folder / CONFIG_FILE, json.dumps(record, indent=2) + "\n")


def check_fingerprint(folder: Path, encoder: Encoder, fingerprint: str) -> None:
    """Raises InputError where the weights of the run in `folder` were trained with another frozen encoder than that
    of `fingerprint`; without a record it passes."""
    record = read_record(folder)
    if record is None or not (record["frozen"] and encoder.frozen):
        return
    pairs = {
        "dtype": (record["dtype"], encoder.dtype),
        "weights": (record["fingerprint"], fingerprint),
    }
    for name, (had, now) in pairs.items():
        require(
            had == now,
            f"[encoder] model = {encoder.model!r}: the run in {folder} was trained with {name} {had}, but now has {now}; "
            "restore that encoder",
        )


def check_mode(
    folder: Path, source: HFEncoderSpec, encoder: Encoder, resumes: bool, model_only: bool
) -> bool:
    """True if the weights to load, of the run in `folder`, lack the text encoder that is now trained. `resumes`: that run
    continues; otherwise a new one starts from its weights, from the model alone if `model_only`."""
    record = read_record(folder)
    if record is None or record["frozen"] == encoder.frozen:
        return False
    given = f"[encoder] frozen = {str(encoder.frozen).lower()}, but the run in {folder}"
    if resumes:
        raise InputError(
            f"{given} was trained with the opposite; set it back, or start a new [job] experiment with [checkpoint] "
            "initial_load_path in that folder"
        )
    if encoder.frozen:
        raise InputError(f"{given} has trained its text encoder; set frozen = false")
    if not model_only:
        raise InputError(
            f"{given} has no optimizer state of the encoder; set [checkpoint] initial_load_model_only = true"
        )
    if source.fingerprint(record["dtype"]) != record["fingerprint"]:
        raise InputError(
            f"[encoder] model = {encoder.model!r} is not the encoder that the run in {folder} was trained with; restore it"
        )
    return True


def load_run_encoder(
    folder: Path, encoder: Encoder, device: torch.device | str
) -> PretrainedTextEncoder:
    """The frozen encoder of the trained run in `folder`."""
    source = find_source(encoder.model, folder=folder)
    fetch_weights(source.model)
    check_fingerprint(folder, encoder, source.fingerprint(encoder.dtype))
    return load_text_encoder(encoder, device, folder)
