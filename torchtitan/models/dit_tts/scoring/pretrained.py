"""Pretrained models of transformers from a folder or the hub, complete or not at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.models.dit_tts.errors import InputError

# What only training uses, and checkpoints of the hub lack: the loss's class vectors, the mask.
_OF_TRAINING = ("objective.", "masked_spec_embed")


def load_model(model_class: Any, name: str, spec: str, **options: Any) -> Any:
    """A model of a class of transformers, in evaluation mode on the CPU.

    Args:
        name: folder or hub name.
        spec: what the user wrote, for messages.

    Raises:
        InputError: it cannot be found or is no such model, or lacks weights.
    """

    def load(**where: Any) -> Any:
        return model_class.from_pretrained(name, output_loading_info=True, **where, **options)

    with _quiet():
        model, found = from_folder_or_hub(load, name, spec)
    missing = [key for key in found["missing_keys"] if not any(k in key for k in _OF_TRAINING)]
    if missing:
        raise InputError(
            f"'{spec}': the checkpoint lacks {len(missing)} weights of a {type(model).__name__}, the "
            f"first is {min(missing)}; give one that was trained for this task"
        )
    return model.eval()


def from_folder_or_hub(load: Callable[..., Any], name: str, spec: str) -> Any:
    """load(local_files_only=...) of what this machine has, else of the hub.

    Raises:
        InputError: neither has it.
    """
    reason: Exception | None = None
    for offline in (True,) if os.path.isdir(name) else (True, False):
        try:
            return load(local_files_only=offline)
        except Exception as error:  # the libraries' validators raise kinds of their own
            reason = error
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    raise InputError(
        f"'{spec}' cannot be loaded from {name} ({lines[0].rstrip('.:')}); give a folder that holds the "
        f"complete model, or a name that the hub has and that was fetched where there is a network: "
        f"hf download {name}"
    ) from reason


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress bars and the table of missing keys, for which there is a sentence."""
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
