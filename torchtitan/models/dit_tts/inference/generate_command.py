"""`titan-tts generate`: says a text in a speaker's voice with a trained run."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from torchtitan.models.dit_tts.codec import Codec, build_codec
from torchtitan.models.dit_tts.codec.record import check_codec
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.inference.audio_files import write_wav
from torchtitan.models.dit_tts.inference.duration import fit_durations
from torchtitan.models.dit_tts.inference.load_run import LoadedRun, load_run
from torchtitan.models.dit_tts.inference.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.inference.speaker_reference import (
    encode_reference,
    reference_settings,
)
from torchtitan.models.dit_tts.prepare.settings import AudioSettings, number_or_off
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, with_duration
from torchtitan.models.dit_tts.text.vocabulary import named

_SHOWN = 20
"""known values that a sentence names"""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that override the run's [sampling] section."""
    parser.add_argument("run", help="the run's folder, outputs/NAME")
    parser.add_argument("--step", type=int, help="checkpoint step; the last by default")
    parser.add_argument(
        "--no-ema", action="store_true", help="the trained weights, not the average"
    )
    parser.add_argument("--sampling-steps", type=int, help="Euler steps")
    parser.add_argument("--text-scale", type=float, help="guidance towards the text")
    parser.add_argument("--speaker-scale", type=float, help="guidance towards the speaker")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument(
        "--encoder",
        help="where a frozen text encoder is now; [encoder] model of the run by default",
    )
    parser.add_argument(
        "--codec", help="where the codec is now; [sampling] codec of the run by default"
    )


def build_run_codec(options: argparse.Namespace, run: LoadedRun) -> Codec:
    """The codec of a run's latents, on its device.

    Raises:
        InputError: it cannot be built, or the training archives say that they are another's.
    """
    codec = build_codec(options.codec or run.config.sampling.codec, str(run.device))
    check_codec(codec, run.config.data.path)
    return codec


def sampling_settings(options: argparse.Namespace, run: LoadedRun) -> tuple[Guidance, int]:
    """Guidance and number of steps: the command line's, else the run's config."""
    s = run.config.sampling

    def first(option, default):
        return default if option is None else option

    guidance = Guidance(
        text_scale=first(options.text_scale, s.text_scale),
        speaker_scale=first(options.speaker_scale, s.speaker_scale),
        min_t=s.min_t,
    )
    steps = first(options.sampling_steps, s.steps)
    if steps < 1:
        raise InputError(f"--sampling-steps {steps} must be at least 1")
    return guidance, steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)
    parser.add_argument("--text", required=True, help="what to say")
    parser.add_argument("--out", default="generated.wav", help="wav file to write")
    parser.add_argument("--reference", help="audio file of the speaker")
    parser.add_argument(
        "--reference-loudness",
        type=number_or_off,
        default=argparse.SUPPRESS,  # as None is what "off" means
        metavar="LUFS",
        help="level that the reference is brought to, or off; by default as --loudness was when the "
        f"training data were prepared, and {AudioSettings().loudness:g} without their prepare.json",
    )
    parser.add_argument(
        "--speaker", help="a speaker of the training archives: the reference and the speaker token"
    )
    parser.add_argument("--language", help="value of the language token")
    parser.add_argument("--quality", help="value of the quality token")
    parser.add_argument(
        "--condition",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="value of any conditioning token that the run was trained with; may be repeated",
    )
    parser.add_argument("--data", help="training archives; the run's [data] path by default")
    parser.add_argument(
        "--duration",
        "--seconds",
        dest="seconds",
        type=float,
        help="length in seconds; fitted from the archives by default",
    )


def requested_conditions(
    options: argparse.Namespace, tokenizer: ConditionedTokenizer
) -> dict[str, str]:
    """Values of the conditioning tokens but duration, as a sample's JSON names them.

    A field that is not given is left out, and its token is the unknown one, as it is in the share
    [data] conditioning_dropout of the training samples.

    Raises:
        InputError: a field that the run does not have, or a value that it was not trained with.
    """
    given: dict[str, str] = {}
    for option, name, value in _given_conditions(options):
        known = tokenizer.vocabulary.conditioning
        if name == "duration" or name not in known:
            has = ", ".join(field for field in known if field != "duration") or "none"
            ways = "; the length is set by --duration" if name == "duration" else ""
            raise InputError(
                f"{option}: the run has no conditioning token {name!r} to set; it has: {has}{ways}"
            )
        if name in given:
            raise InputError(f"{option}: {name!r} is given twice; give it once")
        if value not in known[name]:
            raise InputError(
                f"{option}: the run was not trained with {name} {value!r}; it knows: "
                f"{named(known[name], _SHOWN)}"
            )
        given[name] = value
    # A speaker of the archives is a reference first, and of other archives it has no token.
    speakers = tokenizer.vocabulary.conditioning.get("speaker", ())
    if "speaker" not in given and options.speaker in speakers:
        given["speaker"] = options.speaker
    return given


def _given_conditions(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(option as typed, field, value) of each."""
    given = []
    for name in ("language", "quality"):
        value = getattr(options, name)
        if value is not None:
            given.append((f"--{name} {value}", name, value))
    for condition in options.condition:
        name, equals, value = condition.partition("=")
        if not equals:
            raise InputError(
                f"--condition {condition} has no value; write it as FIELD=VALUE, for example "
                f"--condition language=en"
            )
        given.append((f"--condition {condition}", name, value))
    return given


def check_text(text: str, tokenizer: ConditionedTokenizer) -> None:
    """Raises InputError where the run cannot know how to say the text."""
    unknown = tokenizer.unknown_characters(text)
    if unknown:
        known = tokenizer.vocabulary.characters
        knows = (
            f"it knows {known!r}" if known else f"{tokenizer.vocabulary.model} has no ids for them"
        )
        raise InputError(
            f"--text has characters that the run was not trained with ({named(unknown, _SHOWN)}); "
            f"{knows}"
        )


def warn_of_untrained_tokens(conditions: dict[str, str], tokenizer: ConditionedTokenizer) -> None:
    """Says on stderr which unknown tokens are used though training may never have shown them."""
    left_out = [name for name in tokenizer.fields if name not in (*conditions, "duration")]
    if left_out and tokenizer.conditioning_dropout == 0:
        print(
            f"warning: {', '.join(left_out)} not given, and the run was trained with [data] "
            f"conditioning_dropout = 0, so its unknown token may never have been trained",
            file=sys.stderr,
        )


def requested_reference_settings(
    options: argparse.Namespace, data_path: str | Sequence[str]
) -> AudioSettings:
    """What is done to --reference: as the training data had it, but for what the options say."""
    settings = reference_settings(options.data or data_path)
    if "reference_loudness" in options:
        settings = replace(settings, loudness=options.reference_loudness)
    return settings


def _reference_of(dataset: Dataset, speaker: str) -> int:
    """A sample of the speaker, that with the longest reference."""
    codes, speakers = dataset.labels("speaker")
    if speaker not in speakers:
        known = ", ".join(sorted(speakers)[:_SHOWN]) or "none"
        more = f" and {len(speakers) - _SHOWN} more" if len(speakers) > _SHOWN else ""
        raise InputError(f"--speaker {speaker!r} is not in the archives; they have: {known}{more}")
    samples = np.flatnonzero(codes == speakers.index(speaker))
    return int(samples[np.argmax(dataset.reference_frames[samples])])


def run(options: argparse.Namespace) -> int:
    loaded = load_run(options.run, options.step, not options.no_ema, options.encoder)
    codec = build_run_codec(options, loaded)
    guidance, steps = sampling_settings(options, loaded)
    if (options.reference is None) == (options.speaker is None):
        raise InputError("give either --reference FILE or --speaker NAME")
    check_text(options.text, loaded.tokenizer)
    conditions = requested_conditions(options, loaded.tokenizer)
    warn_of_untrained_tokens(conditions, loaded.tokenizer)
    data = loaded.config.data
    dataset = None
    if options.speaker is not None or options.seconds is None:
        dataset = open_training_data(replace(data, path=options.data or data.path))
    if options.reference is not None:
        settings = requested_reference_settings(options, data.path)
        reference = encode_reference(options.reference, codec, settings, data.max_speaker_frames)
    else:
        _, frames_of_reference = dataset.read(_reference_of(dataset, options.speaker))
        reference = torch.from_numpy(frames_of_reference)
    if options.seconds is not None:
        frames = max(1, round(options.seconds * codec.frames_per_second))
    else:
        frames = fit_durations(dataset).frames(options.text, options.speaker)
    request = SpeechRequest(
        options.text,
        reference[: data.max_speaker_frames],
        frames,
        with_duration(conditions, frames, data.frames_per_second),
    )
    [latents] = generate_latents(
        loaded.model,
        loaded.tokenizer,
        loaded.objective,
        [request],
        guidance,
        steps,
        options.seed,
        loaded.device,
        loaded.text_encoder,
    )
    write_wav(options.out, codec.decode(latents), codec.sample_rate)
    print(f"{Path(options.out)}: {frames / codec.frames_per_second:.2f} s from step {loaded.step}")
    return 0
