"""`from_pretrained`: a trained model to speak with from Python."""

from pathlib import Path
from typing import Any, get_args

from titan_tts.speak.sampling_options import SamplingOptions, load_synthesizer
from titan_tts.speak.synthesizer import Synthesizer
from torchtitan.models.dit_tts.errors import InputError


def from_pretrained(name: str | Path, data: str = "", **options: Any) -> Synthesizer:
    """Loads a trained model to speak with.

    Args:
        name: an exported folder, a run's folder, or OWNER/NAME on the Hugging Face hub.
        data: training shards that lengths of texts and voices are taken from, if they have moved.
        options: options of `titan-tts generate`: step, weights, sampling_steps, text_scale, speaker_scale, dtype,
            compile, encoder, codec, duration, duration_scale.
    """
    known = SamplingOptions.__dataclass_fields__
    names = [each for each in known if each not in ("run", "seed")]  # `synthesize` takes a seed
    if unknown := sorted(set(options) - set(names)):
        raise InputError(f"from_pretrained has no option {unknown[0]!r}; it has {', '.join(names)}")
    for option in ("dtype", "compile"):
        allowed = get_args(known[option].type)
        if option in options and options[option] not in allowed:
            raise InputError(
                f"{option} = {options[option]!r}, but it must be one of {', '.join(allowed)}"
            )
    return load_synthesizer(SamplingOptions(run=str(name), data=data, **options))
