"""Checks of `[sampling]`, of a run's config as of what a command changes in it."""

from torchtitan.models.dit_tts.config.job_config import (
    EPSS_INTERVALS,
    EVALUATIONS_PER_STEP,
    Sampling,
)
from torchtitan.models.dit_tts.config.keys import check_numbers
from torchtitan.models.dit_tts.errors import require


def check_sampling(sampling: Sampling) -> None:
    """Raises InputError at the first setting that cannot work."""
    s = sampling
    check_numbers(s, "sampling")
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
        s.zero_init_steps < intervals,
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
