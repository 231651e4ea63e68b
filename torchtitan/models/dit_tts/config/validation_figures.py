"""The figures of validation.jsonl, and names of averaged weights."""

import re
from collections.abc import Collection

from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig

FIGURES: dict[str, tuple[str, str, bool | None]] = {
    "best_heldout_loss": ("lowest of all weights", ".4f", False),
    "heldout_loss": ("held-out loss", ".4f", False),
    "training_loss": ("training samples", ".4f", None),
    "gap": ("gap", "+.4f", None),
    "text_gain": ("text gain", ".4f", True),
    "speaker_gain": ("speaker gain", ".4f", True),
    "caption_gain": ("caption gain", ".4f", True),
    "seconds_error": ("error of lengths in seconds", ".3f", False),
    "within_10_percent": ("lengths within 10 %", ".0%", True),
    "wer": ("WER", ".1%", False),
    "cer": ("CER", ".1%", False),
    "speaker_similarity": ("speaker similarity", ".3f", True),
    "opinion": ("opinion", ".2f", True),
    "duration_error": ("duration error", ".1%", None),
    "real_time_factor": ("real-time factor", ".3f", None),
}
"""Figure -> its words, its form, and whether more of it is better; None: no checkpoint is kept by it. In names of
keep_best a suffix names a time or weights, as in heldout_loss_at_0.9 and heldout_loss_raw"""

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
    """None for a name that does not name one of these figures."""
    return next(
        (better for name, (*_, better) in FIGURES.items() if f"{figure}_".startswith(f"{name}_")),
        None,
    )


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
    gains = ["text_gain", "speaker_gain"] + ["caption_gain"] * (config.data.max_caption_tokens > 0)
    for name in gains:
        found |= {f"{name}{end}" for end in ("", *times)}
    if samples.freq:
        found |= {"wer", "cer"} if samples.recognizer else set()
        found |= {"speaker_similarity"} if samples.speaker_scorer else set()
        found |= {"opinion"} if samples.opinion else set()
    return found
