"""Checks of `[model] flavor = "duration"`."""

from operator import attrgetter
from typing import Any

from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig
from torchtitan.models.dit_tts.errors import require

_NEEDED: dict[str, tuple[Any, str]] = {
    "model.text_positions": ("none", "positions of the text follow from the length"),
    "objective.text_dropout": (0.0, "a length without its text is a mean over all texts"),
    "objective.loss_on_padding": (False, "padding would count as speech"),
    "optimizer.base_dim": (0, "there is one such flavor"),
    "activation_checkpoint.mode": ("none", "it is small"),
    "samples.freq": (0, "it says nothing"),
}


def check_duration(config: JobConfig) -> None:
    """Refuses settings that a duration predictor would ignore or misunderstand."""
    if config.model.flavor != DURATION_FLAVOR:
        return
    for name, (needed, why) in _NEEDED.items():
        section, _, key = name.partition(".")
        found = attrgetter(name)(config)
        require(
            found == needed,
            f"[{section}] {key} = {found!r} with [model] flavor = 'duration', but {why}; set it to {needed!r}",
        )
    require(
        config.data.on_too_long != "crop",
        "[data] on_too_long = 'crop' with [model] flavor = 'duration', but a cropped utterance is shorter than "
        "its text; set it to 'drop'",
    )
    require(
        "duration" not in config.data.conditioning,
        "[data] conditioning has 'duration' with [model] flavor = 'duration', which predicts it; take it out "
        "of the list",
    )
