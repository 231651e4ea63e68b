"""`titan-tts generate`: synthesizes a text in a speaker's voice with a trained run."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from torchtitan.models.dit_tts.config.old_keys import option_name
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.codec import Codec
    from torchtitan.models.dit_tts.config.job_config import JobConfig, Sampling
    from torchtitan.models.dit_tts.inference.load_run import LoadedRun
    from torchtitan.models.dit_tts.inference.synthesizer import Synthesizer
    from torchtitan.models.dit_tts.text.durations import LinearDurationModel
    from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer

MAX_SECONDS = 600.0
# More than anybody says in that time.
MAX_CHARACTERS = 20_000
# None: as the run has it.
Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
_SHOWN = 20
"""known values that a message names"""


@dataclass
class SamplingOptions:
    """Options of both `generate` and `evaluate`; the run's [sampling] has the defaults."""

    run: tyro.conf.Positional[str]
    """The run's folder, outputs/NAME, or a folder that titan-tts export wrote, here or on the hub."""

    step: Annotated[int | Literal["best"] | None, tyro.conf.arg(metavar="INT|best")] = None
    """Checkpoint step, or best for the one that [validation] keep_best kept; the last by default."""

    weights: str = ""
    """raw, ema or ema:DECAY; by default those with the lowest held-out loss (of the best step: those that
    it was measured with), else the slowest average."""

    sampling_steps: Integer = None
    """Evaluations of the network; as every key of [sampling] also by --sampling.steps."""

    text_scale: Number = None
    """Guidance towards the text."""

    speaker_scale: Number = None
    """Guidance towards the speaker."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the network; auto is bfloat16 on a GPU and float32 on a CPU, of which those with
    AVX512-BF16 or AMX are three times faster in bfloat16."""

    compile: Literal["off", "default", "reduce-overhead"] = "off"
    """Compiles the blocks, for any lengths, in a mode of torch.compile; reduce-overhead replays CUDA graphs
    on a GPU. It takes up to a minute, once."""

    seed: int = 0
    """Seed of the noise."""

    encoder: str = ""
    """Where a frozen text encoder is now; [encoder] model of the run by default."""

    codec: str = ""
    """Where the codec is now; [sampling] codec of the run by default."""

    duration: str = ""
    """What tells how long a text takes: the folder of a duration predictor; fit, its letters as fitted on the
    training data; or rate, the reference's rate, whose text must be known. By default the predictor in the
    run's folder or beside it (duration/), else fit."""

    duration_scale: float = 1.0
    """Factor of these lengths."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    """Keys of [sampling], --sampling.key value"""


@dataclass(kw_only=True)
class Options(SamplingOptions):
    """Synthesize a text in a speaker's voice with a trained run."""

    text: str
    """What to say."""

    out: str = "generated.wav"
    """Wav file to write."""

    reference: str = ""
    """Audio file of the speaker."""

    reference_text: str = ""
    """What the reference says, if it is known: its rate then counts for the length."""

    reference_loudness: float | Literal["off"] | None = None
    """LUFS of the reference, or off; by default as --loudness was for the training data."""

    speaker: str = ""
    """A speaker of the training shards: gives the reference and the speaker token."""

    condition: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """FIELD=VALUE of a conditioning token, such as language=en; may be repeated."""

    data: str = ""
    """Training shards, for --speaker; the run's [data] path by default."""

    seconds: Number = None
    """Length in seconds, instead of --duration."""


def run(options: Options) -> int:
    check_options(options)

    def warn_of_unseen(durations: "LinearDurationModel") -> None:
        from torchtitan.models.dit_tts.text.vocabulary import named

        if unseen := durations.unseen(options.text):
            print(
                f"warning: --text has characters that no training text has ({named(unseen, _SHOWN)}), "
                f"which count for nothing in its length; give --seconds",
                file=sys.stderr,
            )

    synthesizer = load_synthesizer(options, options.data, on_fit=warn_of_unseen)
    loaded = synthesizer.run

    from torchtitan.models.dit_tts.inference.synthesizer import Utterance
    from torchtitan.models.dit_tts.sampling.sound_files import write_wav

    check_text(options.text, loaded.tokenizer)
    conditions = requested_conditions(options, loaded.tokenizer)
    warn_of_untrained_tokens(conditions, loaded.tokenizer)
    if options.reference:
        voice = synthesizer.recording(
            options.reference, options.reference_loudness, options.reference_text
        )
    else:
        voice = synthesizer.speaker(options.speaker)
    utterance = Utterance(options.text, voice, conditions, options.seconds)
    [speech] = synthesizer.synthesize([utterance], seed=options.seed)
    write_wav(options.out, speech.waveform, speech.sample_rate)
    told_by = "--seconds" if options.seconds is not None else synthesizer.lengths.name
    print(
        f"{Path(options.out)}: {speech.seconds:.2f} s (by {told_by}) from step {loaded.step} "
        f"({loaded.weights})"
    )
    return 0


def load_synthesizer(
    options: SamplingOptions,
    data_path: str = "",
    refit: bool = False,
    on_fit: "Callable[[LinearDurationModel], None]" = lambda durations: None,
) -> "Synthesizer":
    """What `load_for_sampling` loads, with its lengths of texts and its voices.

    Args:
        data_path: training shards instead of the run's, or of what an exported folder has.
        refit: whether lengths are fitted to these, too.
        on_fit: called with the fit on the training data, where lengths come from it.
    """
    loaded, codec, sampling = load_for_sampling(options)

    from torchtitan.models.dit_tts.inference.lengths import Lengths, open_lengths
    from torchtitan.models.dit_tts.inference.speech_data import open_speech_data
    from torchtitan.models.dit_tts.inference.synthesizer import Synthesizer

    speech_data = open_speech_data(loaded, data_path, refit)

    def fit() -> "LinearDurationModel":
        on_fit(speech_data.durations)
        return speech_data.durations

    def lengths() -> Lengths:
        return open_lengths(options.duration, options.duration_scale, loaded, fit)

    path = data_path or loaded.config.data.path
    return Synthesizer(loaded, codec, speech_data, sampling, lengths, path)


def check_options(options: Options) -> None:
    """Raises InputError for what can be seen without the run, whose checkpoint takes long to load."""
    if not options.text.strip():
        raise InputError("--text is empty; give what to say")
    if len(options.text) > MAX_CHARACTERS:
        raise InputError(
            f"--text has {len(options.text)} characters, but at most {MAX_CHARACTERS} are said at once; "
            "split it"
        )
    if bool(options.reference) == bool(options.speaker):
        raise InputError("give either --reference FILE or --speaker NAME")
    if options.reference and not Path(options.reference).is_file():
        raise InputError(f"--reference = {options.reference}, but there is no such file")
    if options.seconds is not None and not 0 < options.seconds <= MAX_SECONDS:
        raise InputError(
            f"--seconds = {options.seconds:g}, but it must be above 0 and at most {MAX_SECONDS:g}"
        )
    if options.reference_text and not options.reference:
        raise InputError("--reference-text needs --reference, the recording that says it")
    if options.duration == "rate" and options.seconds is None and not options.reference_text:
        raise InputError("--duration = rate needs --reference with --reference-text")
    if not options.out.endswith(".wav"):
        raise InputError(f"--out = {options.out}, but only .wav is written; give such a name")
    check_writable(options.out, "--out")


def chosen_config(options: SamplingOptions) -> "JobConfig":
    """The run's config, with what the options change in [sampling].

    Raises:
        InputError: an option is out of range, does not go with another one, or is of another section.
    """
    for name, value, low, high in (
        ("--sampling-steps", options.sampling_steps, 1, 10_000),
        ("--text-scale", options.text_scale, -100, 100),
        ("--speaker-scale", options.speaker_scale, -100, 100),
        ("--seed", options.seed, 0, 2**63 - 1),
        ("--duration-scale", options.duration_scale, 0.1, 10),
    ):
        if value is not None and not low <= value <= high:
            raise InputError(f"{name} = {value}, but it must be from {low} to {high}")
    for arg in options.config_args:
        if arg.startswith("--") and not option_name(arg).startswith("sampling."):
            raise InputError(
                f"{arg} cannot be changed in a trained run; of a config's keys give only those of [sampling], "
                f"such as --sampling.steps 16"
            )
    from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR
    from torchtitan.models.dit_tts.config.manager import load_run_config
    from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
    from torchtitan.models.dit_tts.inference.hub import find_folder

    config = load_run_config(find_folder(options.run), options.config_args)
    if config.model.flavor == DURATION_FLAVOR:
        raise InputError(
            f"{options.run} predicts lengths and says nothing; give the run of a model that speaks, and this "
            f"one by --duration"
        )
    given: dict[str, Any] = {
        "steps": options.sampling_steps,
        "text_scale": options.text_scale,
        "speaker_scale": options.speaker_scale,
        "codec": options.codec or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    sampling = replace(config.sampling, **given)
    check_sampling(sampling)
    return replace(config, sampling=sampling)


def load_for_sampling(options: SamplingOptions) -> tuple["LoadedRun", "Codec", "Sampling"]:
    """The run, the codec of its latents, and how to sample.

    Raises:
        InputError: one cannot be loaded, or the training shards record another codec.
    """
    config = chosen_config(options)  # before seconds of imports
    if options.compile != "off":
        from torchtitan.models.dit_tts.infra.compile_cache import set_compile_cache_folder

        print(set_compile_cache_folder(config.compile.cache_folder), file=sys.stderr)

    from torchtitan.models.dit_tts.codec import build_codec
    from torchtitan.models.dit_tts.codec.record import check_codec
    from torchtitan.models.dit_tts.inference.hub import find_folder
    from torchtitan.models.dit_tts.inference.load_run import load_run

    folder = find_folder(options.run)
    loaded = load_run(folder, options.step, options.weights, options.encoder, options.dtype)
    if options.compile != "off":
        from torchtitan.models.dit_tts.infra.compile import compile_for_any_lengths

        compile_for_any_lengths(loaded.model, options.compile)
    codec = build_codec(config.sampling.codec, str(loaded.device))
    channels = loaded.config.data.latent_channels
    if codec.latent_channels != channels:
        raise InputError(
            f"codec {codec.name!r} has latents of {codec.latent_channels} channels, but the run was trained "
            f"with [data] latent_channels = {channels}; give its codec by --codec"
        )
    check_codec(codec, loaded.config.data.path)
    return loaded, codec, config.sampling


def requested_conditions(options: Options, tokenizer: "ConditionedTokenizer") -> dict[str, str]:
    """Values of the conditioning tokens but duration, as a sample's JSON names them.

    A field that is not given is left out, and its token is the unknown one, as it is in the fraction
    [data] conditioning_dropout of the training samples.

    Raises:
        InputError: a field that the run does not have, or a value that it was not trained with.
    """
    from torchtitan.models.dit_tts.text.vocabulary import named

    known = {k: v for k, v in tokenizer.vocabulary.conditioning.items() if k != "duration"}
    given: dict[str, str] = {}
    for condition in options.condition:
        name, equals, value = condition.partition("=")
        if not equals or name not in known:
            raise InputError(
                f"--condition = {condition}, but it must be FIELD=VALUE with a conditioning token of "
                f"the run: {', '.join(known) or 'it has none'} (the length is --seconds)"
            )
        if value not in known[name]:
            raise InputError(
                f"--condition = {condition}, but the run was not trained with {name} {value!r}; it "
                f"knows: {named(known[name], _SHOWN)}"
            )
        given[name] = value
    # A speaker of other shards gives the reference only: the run has no token for it.
    speakers = known.get("speaker", ())
    if "speaker" not in given and options.speaker in speakers:
        given["speaker"] = options.speaker
    return given


def check_text(text: str, tokenizer: "ConditionedTokenizer", name: str = "--text") -> None:
    """Raises InputError where the run cannot know how to say the text, which `name` is of."""
    from torchtitan.models.dit_tts.text.vocabulary import named

    unknown = tokenizer.unknown_characters(text)
    if unknown:
        known = tokenizer.vocabulary.characters
        knows = (
            f"it knows {known!r}" if known else f"{tokenizer.vocabulary.model} has no ids for them"
        )
        raise InputError(
            f"{name} has characters that the run was not trained with ({named(unknown, _SHOWN)}); "
            f"{knows}"
        )


def warn_of_untrained_tokens(conditions: dict[str, str], tokenizer: "ConditionedTokenizer") -> None:
    """Warns on stderr of unknown tokens that training may never have used."""
    left_out = [name for name in tokenizer.fields if name not in (*conditions, "duration")]
    if left_out and tokenizer.conditioning_dropout == 0:
        print(
            f"warning: {', '.join(left_out)} not given, and the run was trained with [data] "
            f"conditioning_dropout = 0, so its unknown token may never have been trained",
            file=sys.stderr,
        )
