"""Pretrained models of transformers from a folder or the hub, complete or not at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import require_hub

# What only training uses, and checkpoints of the hub lack: the loss's class vectors, the mask.
_OF_TRAINING = ("objective.", "masked_spec_embed")


def load_model(model_class: Any, name: str, spec: str, **options: Any) -> Any:
    """A model of a class of transformers, in evaluation mode on the CPU.

    Args:
        name: folder or hub name.
        spec: what the user wrote, for messages.
    """

    def load(**where: Any) -> Any:
        # Other shapes are found below, with what is missing.
        options_ = {**where, **options, "ignore_mismatched_sizes": True}
        return model_class.from_pretrained(name, output_loading_info=True, **options_)

    with quiet():
        model, found = from_folder_or_hub(load, name, spec)
    absent = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    absent = {key for key in absent if not any(part in key for part in _OF_TRAINING)}
    if absent:
        raise InputError(
            f"'{spec}': {len(absent)} weights of a {type(model).__name__} are missing or have another "
            f"shape, the first is {min(absent)}; give a checkpoint that was trained for this task"
        )
    return model.eval()


def from_folder_or_hub(load: Callable[..., Any], name: str, spec: str) -> Any:
    """load(local_files_only=...) of what this machine has, else of the hub."""
    is_folder, is_path = os.path.isdir(name), name.startswith((".", "/", "~"))
    reason: Exception | None = None
    for offline in (True,) if is_folder or is_path else (True, False):
        try:
            if not offline:
                require_hub()
            return load(local_files_only=offline)
        except Exception as error:  # the libraries' validators raise kinds of their own
            reason = error
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    if is_folder:
        advice = "give a folder that holds the complete model, as it was downloaded"
    elif is_path:
        advice = "there is no such folder"
    else:
        hub = f"Systran/faster-whisper-{name}" if spec.startswith("faster") else name
        hub = name if "/" in name else hub
        advice = f"give a folder, or download it where there is a network: hf download {hub}"
    raise InputError(f"'{spec}' cannot be loaded ({lines[0].rstrip('.:')}); {advice}") from reason


@contextmanager
def quiet() -> Iterator[None]:
    """Hides progress bars, advice to programmers and the table of missing keys."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
