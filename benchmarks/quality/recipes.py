"""What is compared: recipes, each a set of config keys over the shipped config and a program that runs it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.config.job_config import JobConfig

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = "train_configs/debug.toml"

PACKAGE = ("-m", "titan_tts")
INFILL = ("-m", "benchmarks.quality.infill_run")
"""Python's arguments before `train ...` and `evaluate ...`"""

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {"model.text_positions": "none"},
    "logit_mean_0": {"objective.logit_mean": 0.0},
    "drawn_references": {"data.references": "drawn"},
    "muon": {"optimizer.name": "Muon"},
}
"""Recipe -> the keys that turn one switch of the shipped config. To compare another, add a line."""

_NONE_OF_OURS: dict[str, Any] = {
    "model.text_positions": "none",
    "data.references": "stored",
}


@dataclass(frozen=True)
class Recipe:
    name: str
    about: str
    """one sentence for the report"""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """SECTION.KEY -> value, over the shipped config"""

    keys_where_known: Mapping[str, Any] = field(default_factory=dict)
    """the same, left out where the schema has no such key"""

    fractions: Mapping[str, float] = field(default_factory=dict)
    """SECTION.KEY -> its fraction of the budget's steps, at least 1"""

    program: tuple[str, ...] = PACKAGE
    before: tuple[str, ...] = ()
    """arguments of the program before its command"""

    def settings(self, steps: int) -> dict[str, Any]:
        """SECTION.KEY -> value for a run of so many steps."""
        known = {key: value for key, value in self.keys_where_known.items() if has_key(key)}
        parts = {key: max(1, round(part * steps)) for key, part in self.fractions.items()}
        return {**known, **self.keys, **parts}

    def why_not(self) -> str:
        """Why the recipe cannot be run in this checkout; empty where it can."""
        unknown = [key for key in (*self.keys, *self.fractions) if not has_key(key)]
        if unknown:
            return f"{unknown[0]} is no key of this checkout"
        if self.name in SWITCHES and all(shipped(k) == v for k, v in self.keys.items()):
            return "it is the shipped recipe: the switch is off"
        return ""


def has_key(name: str) -> bool:
    """Whether the config's schema has SECTION.KEY."""
    section, _, key = name.partition(".")
    config = JobConfig()
    found = getattr(config, section, None)
    return is_dataclass(found) and key in {each.name for each in fields(found)}


def shipped(name: str) -> Any:
    """The value of SECTION.KEY in the shipped config; the schema's default where it has none."""
    section, _, key = name.partition(".")
    written = tomllib.loads((ROOT / CONFIG).read_text())
    default = getattr(getattr(JobConfig(), section), key)
    return written.get(section, {}).get(key, default)


def _switch_about(keys: Mapping[str, Any]) -> str:
    return "shipped with " + ", ".join(f"{key} = {value}" for key, value in keys.items())


# The public configs of Irodori-TTS (train_500m_v2.yaml) and its defaults for what they leave out: stratified
# logit-normal(0, 1) times, rows of one fixed length with the padded tail in the loss, 10 % condition dropout,
# Muon and AdamW (0.9, 0.999) with one rate and a decay of 0.01, 2 % of the steps warm-up, 10 % cosine decay
# to 1 %. Its rate of 1e-4 is for 500 million parameters; the sweep is around the shipped rate of this size.
# Sampling as by its defaults: 40 steps, guidance 3 and 5 in the first half of the time.
_IRODORI: dict[str, Any] = {
    "objective.prediction": "velocity",
    "objective.time_distribution": "logit_normal",
    "objective.logit_mean": 0.0,
    "objective.logit_std": 1.0,
    "objective.text_dropout": 0.1,
    "objective.speaker_dropout": 0.1,
    "optimizer.name": "Muon",
    "optimizer.muon_lr": 0.0,
    "optimizer.beta2": 0.999,
    "optimizer.weight_decay": 0.01,
    "lr_scheduler.decay_ratio": 0.1,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.01,
    "sampling.steps": 40,
    "sampling.text_scale": 3.0,
    "sampling.speaker_scale": 5.0,
    "sampling.min_t": 0.5,
}
_FIXED_LENGTH = {"objective.loss_on_padding": True, "data.num_buckets": 1}
# Whole references, which stand before the utterances; uniform times.
_F5: dict[str, Any] = {
    "objective.time_distribution": "uniform",
    "data.max_reference_ratio": 0.0,
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("shipped", f"{CONFIG} as it is"),
        *(Recipe(name, _switch_about(keys), keys) for name, keys in SWITCHES.items()),
        Recipe(
            "irodori",
            "objective, optimizer, schedule and sampling of Irodori-TTS's public config, on our model",
            {**_IRODORI, **_FIXED_LENGTH},
            _NONE_OF_OURS,
            {"lr_scheduler.warmup_steps": 0.02},
        ),
        Recipe(
            "irodori_masked",
            "irodori, in length buckets and with the loss of the speech alone",
            _IRODORI,
            _NONE_OF_OURS,
            {"lr_scheduler.warmup_steps": 0.02},
        ),
        Recipe(
            "f5",
            "in-filling after arXiv 2410.06885 with a model of our own, on utterances alone",
            _F5,
            _NONE_OF_OURS,
            program=INFILL,
        ),
        Recipe(
            "f5_joined",
            "f5, on utterances behind their references, as it is sampled",
            _F5,
            _NONE_OF_OURS,
            program=INFILL,
            before=("--joined",),
        ),
    )
}
PEERS = ("irodori", "irodori_masked", "f5", "f5_joined")
