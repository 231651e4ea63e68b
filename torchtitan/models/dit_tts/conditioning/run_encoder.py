"""The pretrained text encoder of a run: what it is is kept in the run's folder, and then what counts."""

import json
from pathlib import Path
from typing import Any

import torch

from torchtitan.models.dit_tts.conditioning.encoder_source import (
    CONFIG_FILE,
    EncoderSource,
    find_source,
)
from torchtitan.models.dit_tts.conditioning.text_encoder import (
    PretrainedTextEncoder,
    load_text_encoder,
)
from torchtitan.models.dit_tts.data.shard_writer import atomic_file
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.job_config import Encoder


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


def write_record(folder: Path, source: EncoderSource, encoder: Encoder, fingerprint: str) -> None:
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
    """Raises InputError where a run's weights know the features of another encoder.

    Args:
        folder: that of the run that trained the weights; one without a record passes.
        fingerprint: of the encoder that is there now.
    """
    record = read_record(folder)
    if record is None or not encoder.frozen:
        return
    for name, had, now in (
        ("dtype", record["dtype"], encoder.dtype),
        ("weights", record["fingerprint"], fingerprint),
    ):
        if record["frozen"] and had != now:
            raise InputError(
                f"[encoder] model = {encoder.model!r}: the run in {folder} was trained with its "
                f"{name} {had}, and now they are {now}; restore the encoder that the run had"
            )


def load_run_encoder(
    folder: Path, encoder: Encoder, device: torch.device | str
) -> PretrainedTextEncoder:
    """The frozen encoder of the trained run in `folder`.

    Raises:
        InputError: it cannot be loaded, or is not the one that the run was trained with.
    """
    source = find_source(encoder.model, folder=folder)
    check_fingerprint(folder, encoder, source.fingerprint(encoder.dtype))
    return load_text_encoder(encoder, device, folder)
