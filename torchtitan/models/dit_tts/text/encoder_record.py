"""The record of a run's pretrained text encoder, in the run folder. On resume it wins over the config."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import reading, require
from torchtitan.models.dit_tts.files import write_atomic

CONFIG_FILE = "text_encoder.json"


def write_record(
    folder: Path, model: str, config: dict[str, Any], encoder: Encoder, fingerprint: str
) -> None:
    """Stores an encoder's name, the library's config and the fingerprint, which is empty for a trained encoder."""
    record = {
        "model": model,
        "frozen": encoder.frozen,
        "dtype": encoder.dtype if encoder.frozen else "",
        "fingerprint": fingerprint,
        "config": config,
    }
    write_atomic(folder / CONFIG_FILE, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record that `write_record` wrote into a run folder, without paths; None without one."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return None
    with reading(path, "restore the file that the run wrote"):
        record = _without_paths(read_json_file(path))
        _ = record["model"], record["frozen"], record["dtype"], record["fingerprint"]
        _ = record["config"]["model_type"]
    return record


def _without_paths(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_paths(each) for key, each in config.items() if key != "_name_or_path"}


def check_fingerprint(folder: Path, encoder: Encoder, fingerprint: str) -> None:
    """Raises InputError where the weights of the run in `folder` were trained with another frozen encoder than that
    of `fingerprint`; without a record it passes."""
    record = read_record(folder)
    if record is None or not (record["frozen"] and encoder.frozen):
        return
    had, now = (record["fingerprint"], record["dtype"]), (fingerprint, encoder.dtype)
    require(
        had == now,
        f"[encoder] model = {encoder.model!r}: the run in {folder} was trained with weights {had[0]} in {had[1]}, but "
        f"these are {now[0]} in {now[1]}; restore that encoder",
    )


def begins_to_train(
    folder: Path, encoder: Encoder, fingerprint_in: Callable[[str], str], may_begin: bool
) -> bool:
    """True if the weights to load, of the run in `folder`, lack the text encoder that is now trained, which only a new
    run from the model alone may do (`may_begin`). `fingerprint_in`: the encoder's in a dtype."""
    record = read_record(folder)
    if record is None or record["frozen"] == encoder.frozen:
        return False
    require(
        may_begin and record["frozen"],
        f"[encoder] frozen = {str(encoder.frozen).lower()}, but the run in {folder} was trained with the opposite; set it "
        f"back, or begin to train a frozen run's encoder in a new [job] experiment with [checkpoint] initial_load_path "
        f"there and initial_load_model_only = true",
    )
    require(
        fingerprint_in(record["dtype"]) == record["fingerprint"],
        f"[encoder] model = {encoder.model!r} is not the encoder that the run in {folder} was trained with; restore it",
    )
    return True
