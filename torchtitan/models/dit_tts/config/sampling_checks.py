"""Checks of `[sampling]`, of a run's config as of what a command changes in it."""

from types import SimpleNamespace

from torchtitan.models.dit_tts.config.job_config import EVALUATIONS_PER_STEP, Sampling
from torchtitan.models.dit_tts.config.keys import check_numbers, conflict
from torchtitan.models.dit_tts.errors import InputError


def check_sampling(sampling: Sampling) -> None:
    """Raises InputError at the first setting that cannot work."""
    s = sampling
    check_numbers(s, "sampling")

    def wrong(names: str, why: str) -> InputError:
        keys = " ".join(f"sampling.{name}" for name in names.split())
        return conflict(SimpleNamespace(sampling=s), keys, why)

    if s.min_t > s.max_t:
        raise wrong("min_t max_t", "guidance is applied between them; lower min_t")
    if s.steps % EVALUATIONS_PER_STEP[s.solver]:
        why = "the velocity is evaluated twice per interval; give an even number"
        raise wrong("steps solver", why)
    if s.guidance == "joint" and s.text_scale != s.speaker_scale:
        why = "there is one scale for both conditions; set both to the same"
        raise wrong("guidance text_scale speaker_scale", why)
