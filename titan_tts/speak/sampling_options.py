"""Options that the speaking commands and Python share, and the model that they choose."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from torchtitan.models.dit_tts.config.options import option_name
from torchtitan.models.dit_tts.config.shipped import BASE
from torchtitan.models.dit_tts.errors import check_range, require
from torchtitan.models.dit_tts.files import keep_compiled_kernels

if TYPE_CHECKING:
    from titan_tts.speak.open_run import OpenRun
    from titan_tts.speak.synthesizer import Synthesizer
    from torchtitan.models.dit_tts.config.job_config import JobConfig

# None: as the run has it.
Integer = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(kw_only=True)
class ModelOptions:
    """Options of every command that loads a trained model."""

    step: Annotated[int | Literal["best"] | None, tyro.conf.arg(metavar="INT|best")] = None
    """Checkpoint step, or best for the one that [validation] keep_best kept; the last by default."""

    weights: str = ""
    """raw, ema or ema:DECAY; by default those with the lowest held-out loss (for the best step: those
    that measured it), else the slowest average, else raw."""

    encoder: str = ""
    """Current path of a frozen text encoder, or phones:LANGUAGE for texts in another language than the run reads; the
    run's [encoder] model by default."""

    codec: str = ""
    """Current path of the codec; the run's [sampling] codec by default."""

    data: str = ""
    """Training shards, the source of voices and of the duration fit; the run's [data] path by default."""


@dataclass(kw_only=True)
class SamplingOptions(ModelOptions):
    """Options of `generate`, `evaluate`, `serve` and `from_pretrained`; the run's [sampling] has the
    defaults."""

    run: tyro.conf.Positional[str] = BASE
    """The run's folder, outputs/NAME, a folder that titan-tts export wrote, here or on the hub, or titan_tts:NAME, a
    model that comes with the package."""

    sampling_steps: Integer = None
    """Evaluations of the network; --sampling.steps is the same, as for every key of [sampling]."""

    text_scale: Number = None
    """Guidance towards the text."""

    speaker_scale: Number = None
    """Guidance towards the speaker."""

    caption_scale: Number = None
    """Guidance towards the caption."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the network; auto is bfloat16 on a GPU and on a CPU with AVX512-BF16 or AMX (three times
    faster), float32 on others."""

    compile: Literal["off", "default", "graphs", "reduce-overhead"] = "off"
    """Compiles the blocks for any lengths, which takes up to a minute, once (default); on a GPU, records the network's
    passes as CUDA graphs, anew for each batch (graphs); or both (reduce-overhead)."""

    seed: int = 0
    """Seed of the noise."""

    duration: str = ""
    """Duration estimator: the folder of a duration predictor, or fit, a linear fit to the training data's letters. By
    default the predictor in the run's folder or next to it (duration/), else fit."""

    duration_scale: float = 1.0
    """Factor of the estimated durations."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    """Keys of [sampling], --sampling.key value"""


def load_synthesizer(
    options: SamplingOptions, run: "OpenRun | None" = None, refit: bool = False
) -> "Synthesizer":
    """Loads the run, the codec of its latents, its lengths of texts and its voices.

    Args:
        run: as `choose_run` chose it by these options; None: it is chosen now.
        refit: whether lengths are fitted to `options.data`.
    """
    run = run or choose_run(options)
    graphs = options.compile in ("graphs", "reduce-overhead")
    from torchtitan.tools.utils import device_type

    require(
        not graphs or device_type == "cuda",
        f"--compile {options.compile} records CUDA graphs, and there is no GPU; take default or off",
    )
    keep_compiled_kernels()
    from titan_tts.speak.lengths import Lengths, open_lengths
    from titan_tts.speak.load_run import load_run
    from titan_tts.speak.speech_data import open_speech_data
    from titan_tts.speak.synthesizer import Synthesizer
    from torchtitan.models.dit_tts.speech.codec import build_codec
    from torchtitan.models.dit_tts.speech.codec.record import check_codec

    speech_data = open_speech_data(run.folder, run.config, options.data, refit)
    loaded = load_run(run, encoder=options.encoder, dtype=options.dtype)
    if options.compile in ("default", "reduce-overhead"):
        from torchtitan.models.dit_tts.infra.compile import compile_for_any_lengths

        compile_for_any_lengths(loaded.model)
    if graphs:
        from torchtitan.models.dit_tts.infra.cuda_graphs import record_passes

        record_passes(loaded.model)
    data = loaded.config.data
    codec = build_codec(run.config.sampling.codec, str(loaded.device))
    require(
        codec.latent_channels == data.latent_channels,
        f"codec {codec.name!r} has latents of {codec.latent_channels} channels, the run [data] latent_channels = "
        f"{data.latent_channels}; give its codec by --codec",
    )
    check_codec(codec, data.path)

    def lengths() -> Lengths:
        given = options.duration, options.duration_scale, loaded, lambda: speech_data.durations
        return open_lengths(*given, options.encoder)

    path = options.data or data.path
    return Synthesizer(loaded, codec, speech_data, run.config.sampling, lengths, path)


def from_pretrained(name: str | Path = BASE, data: str = "", **options: Any) -> "Synthesizer":
    """Loads a trained model to speak with from Python.

    Args:
        name: an exported folder, a run's folder, OWNER/NAME on the Hugging Face hub, or titan_tts:NAME of the package.
        data: training shards that lengths of texts and voices are taken from, if they have moved.
        options: options of `titan-tts generate`: step, weights, sampling_steps, text_scale, speaker_scale,
            caption_scale, dtype, compile, encoder, codec, duration, duration_scale.
    """
    for option in ("dtype", "compile"):
        allowed = get_args(SamplingOptions.__dataclass_fields__[option].type)
        value, one_of = options.get(option, allowed[0]), ", ".join(allowed)
        require(value in allowed, f"{option} = {value!r}, but it must be one of {one_of}")
    return load_synthesizer(SamplingOptions(run=str(name), data=data, **options))


def choose_run(options: SamplingOptions) -> "OpenRun":
    """The run and its checkpoint, with the options' changes of [sampling]."""
    config = chosen_config(options)  # before seconds of imports
    from titan_tts.speak.open_run import open_run

    return open_run(options.run, options.step, options.weights, config=config)


def chosen_config(options: SamplingOptions) -> "JobConfig":
    """The run's config, with the options' changes of [sampling]."""
    check_range("--seed", options.seed, 0, 2**63 - 1)
    check_range("--duration-scale", options.duration_scale, 0.1, 10)
    for arg in options.config_args:
        require(
            not arg.startswith("--") or option_name(arg).startswith("sampling."),
            f"{arg} cannot be changed in a trained run; give keys of [sampling] only, such as --sampling.steps 16",
        )
    from titan_tts.speak.open_run import find_folder
    from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR
    from torchtitan.models.dit_tts.config.manager import load_run_config
    from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
    from torchtitan.models.dit_tts.config.trust import refuse_function_as_codec

    config = load_run_config(find_folder(options.run), options.config_args)
    if not (options.codec or any(option_name(a) == "sampling.codec" for a in options.config_args)):
        refuse_function_as_codec(config.sampling.codec, options.run, "--codec")
    require(
        config.model.flavor != DURATION_FLAVOR,
        f"{options.run} predicts lengths and generates no speech; give it by --duration, and a run that speaks",
    )
    given: dict[str, Any] = {
        "steps": options.sampling_steps,
        "text_scale": options.text_scale,
        "speaker_scale": options.speaker_scale,
        "caption_scale": options.caption_scale,
        "codec": options.codec or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    sampling = replace(config.sampling, **given)
    check_sampling(sampling)
    return replace(config, sampling=sampling)
