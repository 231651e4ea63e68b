"""`titan-tts generate`: says a text in a speaker's voice with a trained run."""

import argparse
from pathlib import Path

import torch

from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.data.archive import Dataset, open_dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.inference.audio_files import read_audio, write_wav
from torchtitan.models.dit_tts.inference.duration import fit_durations
from torchtitan.models.dit_tts.inference.load_run import LoadedRun, load_run
from torchtitan.models.dit_tts.inference.sampler import SpeechRequest, generate_latents


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that override the run's [sampling] section."""
    parser.add_argument("run", help="the run's folder, outputs/NAME")
    parser.add_argument("--step", type=int, help="checkpoint step; the last by default")
    parser.add_argument("--no-ema", action="store_true", help="the trained weights, not the average")
    parser.add_argument("--sampling-steps", type=int, help="Euler steps")
    parser.add_argument("--text-scale", type=float, help="guidance towards the text")
    parser.add_argument("--speaker-scale", type=float, help="guidance towards the speaker")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")


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
    parser.add_argument("--speaker", help="a speaker of the training archives, instead of a file")
    parser.add_argument("--data", help="training archives; the run's [data] path by default")
    parser.add_argument("--seconds", type=float, help="length; fitted from the archives by default")


def _reference_of(dataset: Dataset, speaker: str) -> int:
    """A sample of the speaker, that with the longest reference. Reads every sample's metadata."""
    known: dict[str, int] = {}
    best = -1
    for index in range(len(dataset.frames)):
        name = str(dataset.metadata(index).get("speaker", ""))
        known.setdefault(name, index)
        if name == speaker and (
            best < 0 or dataset.reference_frames[index] > dataset.reference_frames[best]
        ):
            best = index
    if best < 0:
        raise InputError(
            f"--speaker {speaker!r} is not in the archives; they have: {', '.join(sorted(known))}"
        )
    return best


def run(options: argparse.Namespace) -> int:
    loaded = load_run(options.run, options.step, not options.no_ema)
    codec = build_codec(loaded.config.sampling.codec)
    guidance, steps = sampling_settings(options, loaded)
    if (options.reference is None) == (options.speaker is None):
        raise InputError("give either --reference FILE or --speaker NAME")
    dataset = None
    if options.speaker is not None or options.seconds is None:
        dataset = open_dataset(
            options.data or loaded.config.data.path, loaded.config.data.latent_channels
        )
    if options.reference is not None:
        reference = codec.encode(read_audio(options.reference, codec.sample_rate))
    else:
        _, frames_of_reference = dataset.read(_reference_of(dataset, options.speaker))
        reference = torch.from_numpy(frames_of_reference)
    if options.seconds is not None:
        frames = max(1, round(options.seconds * codec.frames_per_second))
    else:
        frames = fit_durations(dataset).frames(options.text, options.speaker)
    request = SpeechRequest(
        options.text, reference[: loaded.config.data.max_speaker_frames], frames
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
    )
    write_wav(options.out, codec.decode(latents), codec.sample_rate)
    print(f"{Path(options.out)}: {frames / codec.frames_per_second:.2f} s from step {loaded.step}")
    return 0
