"""The figures of validation.jsonl that `[validation] keep_best` may name, and names of averaged weights."""

import re
from collections.abc import Collection

from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig

LOWER_IS_BETTER = ("best_heldout_loss", "heldout_loss", "wer", "cer", "seconds_error")
HIGHER_IS_BETTER = (
    "text_gain",
    "speaker_gain",
    "speaker_similarity",
    "opinion",
    "within_10_percent",
)
"""Prefixes: a suffix names a time or weights, as in heldout_loss_at_0.9 and wer_raw"""

_ENTRY = re.compile(r"ema\.(decay-(\d+(?:\.\d+)?(?:e-\d+)?)\.)")


def decay_name(decay: float) -> str:
    """A decay as it stands in names of weights and figures."""
    return f"{decay:.10g}"


def prefix(decay: float) -> str:
    """Prefix of a decay's averaged weights in a checkpoint's "ema"."""
    return f"decay-{decay_name(decay)}."


def saved_prefixes(names: Collection[str]) -> list[str]:
    """Prefixes of the averages among a checkpoint's entries, the fastest average first."""
    found = {m[1]: float(m[2]) for m in map(_ENTRY.match, names) if m}
    return sorted(found, key=lambda each: found[each])


def is_higher_better(figure: str) -> bool | None:
    """None for a name that is none of these figures."""
    for higher, names in ((False, LOWER_IS_BETTER), (True, HIGHER_IS_BETTER)):
        if any(figure == name or figure.startswith(f"{name}_") for name in names):
            return higher
    return None


def measured_figures(config: JobConfig) -> set[str]:
    """Figures that a run with this config measures."""
    samples, ema = config.samples, config.ema
    averages = [f"_ema:{decay_name(decay)}" for decay in ema.decays] if ema.enable else []
    times = [f"_at_{t:g}" for t in config.validation.times]
    found = {"best_heldout_loss"}
    losses = ["heldout_loss"]
    if config.model.flavor == DURATION_FLAVOR:
        losses += ["seconds_error", "within_10_percent"]
    found |= {f"{name}{end}" for name in losses for end in ("", *times, "_raw", *averages)}
    for name in ("text_gain", "speaker_gain"):
        found |= {f"{name}{end}" for end in ("", *times)}
    if samples.freq:
        speech = ["wer", "cer"] if samples.recognizer else []
        speech += ["speaker_similarity"] if samples.speaker_scorer else []
        speech += ["opinion"] if samples.opinion else []
        ends = ("", "_raw") if samples.raw and ema.enable else ("",)
        found |= {f"{name}{end}" for name in speech for end in ends}
    return found
