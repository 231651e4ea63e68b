"""Checks of `[sampling]`, of a run's config as of what a command changes in it."""

import math
from dataclasses import fields

from torchtitan.models.dit_tts.config.job_config import (
    EPSS_INTERVALS,
    EVALUATIONS_PER_STEP,
    Sampling,
)
from torchtitan.models.dit_tts.errors import require

_MAX_SWAY = 2 / (math.pi - 2)
"""Above it the times of sway sampling do not fall any more."""

_POSITIVE = "steps truncation_factor rescale_k rescale_sigma speaker_kv_scale"
_FRACTIONS = "min_t max_t speaker_kv_min_t"


def check_sampling(sampling: Sampling) -> None:
    """Raises InputError at the first setting that cannot work."""
    s = sampling
    for field in fields(s):
        value = getattr(s, field.name)
        finite = not isinstance(value, float) or math.isfinite(value)
        require(finite, f"[sampling] {field.name} = {value}, but it must be finite")
    for name in _POSITIVE.split():
        value = getattr(s, name)
        require(value > 0, f"[sampling] {name} = {value}, but it must be greater than 0")
    for name in _FRACTIONS.split():
        value = getattr(s, name)
        require(0 <= value <= 1, f"[sampling] {name} = {value}, but it must be from 0 to 1")
    require(
        s.min_t <= s.max_t,
        f"[sampling] min_t = {s.min_t} is above max_t = {s.max_t}; guidance is applied between them",
    )
    each = EVALUATIONS_PER_STEP[s.solver]
    require(
        s.steps % each == 0,
        f"[sampling] steps = {s.steps} with solver = {s.solver!r}, which evaluates the velocity twice per "
        f"interval; give an even number",
    )
    intervals = s.steps // each
    known = ", ".join(str(each * count) for count in EPSS_INTERVALS)
    require(
        s.schedule != "epss" or intervals in EPSS_INTERVALS,
        f"[sampling] steps = {s.steps} with schedule = 'epss' and solver = {s.solver!r}, but its times are "
        f"known for steps of {known}; give one of these, or schedule = 'sway'",
    )
    require(
        -1 <= s.sway <= _MAX_SWAY,
        f"[sampling] sway = {s.sway}, but it must be from -1 to {_MAX_SWAY:.2f}, or times would repeat",
    )
    require(
        0 <= s.zero_init_steps < intervals,
        f"[sampling] zero_init_steps = {s.zero_init_steps}, but it must be from 0 to {intervals - 1}: the "
        f"schedule has {intervals} intervals, and one must be left",
    )
    require(
        s.guidance != "joint" or s.text_scale == s.speaker_scale,
        f"[sampling] guidance = 'joint' has one scale for both conditions, but text_scale = "
        f"{s.text_scale:g} and speaker_scale = {s.speaker_scale:g}; set both to the same",
    )
    require(
        s.guidance != "alternating" or 0 not in (s.text_scale, s.speaker_scale),
        f"[sampling] guidance = 'alternating' with text_scale = {s.text_scale:g} and speaker_scale = "
        f"{s.speaker_scale:g} leaves steps without guidance; set both, or guidance = 'independent'",
    )
    require(
        not s.cfg_zero_star or any((s.text_scale, s.speaker_scale)),
        "[sampling] cfg_zero_star = true scales the branches of guidance, but text_scale and speaker_scale "
        "are 0; set one, or cfg_zero_star = false",
    )
