"""`titan-tts generate`: synthesizes texts in a speaker's voice with a trained run."""

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from titan_tts.speak.long_text import clean_text
from titan_tts.speak.request_lists import Request, read_requests, read_text
from titan_tts.speak.sampling_options import (
    Number,
    SamplingOptions,
    choose_run,
    load_synthesizer,
)
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError, check_range, require, show
from torchtitan.models.dit_tts.files import check_writable
from torchtitan.models.dit_tts.speech.sampling.sound_files import SUFFIXES

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.config.job_config import Data

STANDARD_OUTPUT = "-"


@dataclass(kw_only=True)
class Options(SamplingOptions):
    """Synthesize texts in a speaker's voice with a trained run: one text (--text, --text-file), or many (--text-list)."""

    text: str | None = None
    """Text to synthesize."""

    text_file: str = ""
    """File with the text; - is standard input."""

    text_list: str = ""
    """File of many texts (- is standard input): one JSON object per line with text and any of name, reference,
    reference_text, speaker, caption, seconds, conditions; the options give defaults."""

    out: str = "generated.wav"
    """File to write, .wav, .flac, .ogg, .opus or .mp3; - is standard output, streamed as audio becomes
    available. With --text-list the folder for NAME.wav and NAME.json of each text."""

    format: Literal["", "wav", "flac", "ogg", "mp3", "pcm"] = ""
    """Format of --text-list's files and of standard output; wav by default; pcm (16 bits) for standard output only."""

    reference: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """The speaker: an audio file, or .npy of latents (frames, channels); repeated for the speakers of several turns."""

    reference_text: str = ""
    """Text of the reference, if known; the duration then follows its speaking rate."""

    speaker: str = ""
    """A speaker of the exported folder or the training shards: gives the reference and the speaker token. Without it
    and without --reference the export's first voice speaks; where it has none, and for a run, an arbitrary one."""

    caption: str = ""
    """The voice and its manner in words, such as "a calm old woman, close to the microphone", for a model that was trained
    with captions; alone, or with a reference or a speaker."""

    condition: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """FIELD=VALUE of a conditioning token, such as language=en; may be repeated."""

    seconds: Number = None
    """Length in seconds, instead of --duration; the text is then not split."""

    timestamps: tyro.conf.UseAppendAction[list[Literal["json", "srt", "vtt"]]] = field(
        default_factory=list
    )
    """Also write when each word is said, into files named as the sound: subtitles (srt, vtt), or the words with start and
    end in seconds (json); may be repeated."""

    batch_size: Annotated[int, tyro.conf.arg(metavar="INT")] = 16
    """Pieces of texts per batch."""

    overwrite: bool = False
    """Make files of --text-list again; by default those that this command has completed stay."""


def run(options: Options) -> int:
    check_options(options)
    requests = find_requests(options)
    options = replace(options, out=os.path.expanduser(options.out), format=options.format or "wav")
    chosen = choose_run(options)
    if options.text_list:
        # The checkpoint that is the last or best one now says the whole list.
        options = replace(options, step=chosen.step, weights=chosen.weights)
        requests = _without_existing(options, requests)
        if not requests:
            show(f"{options.out}: all texts are complete")
            return 0
    began = time.perf_counter()
    synthesizer = load_synthesizer(options, chosen)
    from titan_tts.speak.generate import Narrator

    if not all(each.names_voice for each in requests):
        synthesizer.show_default_voice("--speaker")
    # What is missing is told now, not behind the first speech.
    if any(each.seconds is None for each in requests):
        _ = synthesizer.lengths
    if options.timestamps:
        _ = synthesizer.word_aligner
    given = options.seed, options.batch_size, _settings(options), options.timestamps
    narrator = Narrator(synthesizer, *given)
    for request in requests:
        narrator.check(request)
    _warn_of_lengths(requests, synthesizer.run.config.data)
    loading = time.perf_counter() - began
    if options.text_list:
        show(narrator.write_all(requests, options.out, options.format))
    else:
        streams = options.out == STANDARD_OUTPUT
        summary = narrator.write(requests[0], "" if streams else options.out, options.format)
        show(f"{summary}, loading {loading:.1f} s", sys.stderr if streams else sys.stdout)
    return 0


def _warn_of_lengths(requests: list[Request], data: "Data") -> None:
    """Warns of the greatest length that is given, if it is above those of the training."""
    longest = max(requests, key=lambda each: each.seconds or 0.0)
    seconds, most = longest.seconds or 0.0, data.max_frames / data.frames_per_second
    if seconds > most:
        about = f"{longest.named('seconds')} = {seconds:g}, but the model was trained on at most {most:g} s at once"
        show(f"warning: {about}; leave it out, and a long text is split", sys.stderr)


def check_options(options: Options) -> None:
    """Raises InputError for mistakes that show without the run, whose checkpoint takes long to load."""
    given = [options.text is not None, bool(options.text_file), bool(options.text_list)]
    require(sum(given) == 1, "give one of --text TEXT, --text-file FILE and --text-list FILE")
    check_range("--batch-size", options.batch_size, 1, 4096)
    require(
        not options.timestamps or options.out != STANDARD_OUTPUT,
        "--timestamps writes files named as the sound; give a file by --out",
    )
    if options.text_list:
        require(
            options.out not in (STANDARD_OUTPUT, Options.out) and options.format != "pcm",
            "--text-list writes files; give their folder by --out, and another --format than pcm",
        )
        check_writable(Path(options.out) / "any.json", "--out")
    elif options.out != STANDARD_OUTPUT:
        path, suffixes = os.path.expanduser(options.out), ", ".join(SUFFIXES)
        is_sound = Path(path).suffix.lower() in SUFFIXES
        require(is_sound, f"--out = {path}, but its name must end with one of {suffixes}")
        check_writable(options.out, "--out")
        require(
            not options.format,
            "--format is for --text-list and --out - only; a file's name sets its format",
        )
        inputs = map(os.path.realpath, filter(None, (*options.reference, options.text_file)))
        require(
            os.path.realpath(path) not in inputs,
            f"--out = {path}, but that is the input file; give another name",
        )


def find_requests(options: Options) -> list[Request]:
    """The requests of the options and their files."""
    common = Request(
        "the options",
        speaker=options.speaker,
        caption=options.caption,
        conditions=_conditions(options.condition),
        reference=tuple(options.reference),
        reference_text=options.reference_text,
        seconds=options.seconds,
    )
    if options.text_list:
        return read_requests(options.text_list, common)
    where = "--text" if options.text is not None else f"--text-file {options.text_file}"
    text = read_text(options.text_file) if options.text is None else options.text
    request = replace(common, where=where, text=clean_text(text))
    request.check()
    return [request]


def _conditions(given: Iterable[str]) -> dict[str, str]:
    for each in given:
        require("=" in each, f"--condition = {each}, but it must be FIELD=VALUE")
    return dict(each.split("=", 1) for each in given)


def _settings(options: Options) -> str:
    """All options that change the speech, except a request's own."""
    unsaid = ("text_list", "out", "overwrite", "batch_size")
    said = vars(options) | {"run": os.path.normpath(options.run)}
    return json.dumps({k: v for k, v in said.items() if k not in unsaid}, sort_keys=True)


def _without_existing(options: Options, requests: list[Request]) -> list[Request]:
    """Requests of a list that are still to be said."""
    if options.overwrite:
        return requests
    missing, settings = [], _settings(options)
    for request in requests:
        sound = request.path(options.out, options.format)
        about = sound.with_suffix(".json")
        known = read_json(about)
        is_own = known.get("request") == request.fingerprint(settings)
        if not is_own and (sound.exists() or about.exists()):
            raise InputError(
                f"{sound} is there from another text, voice, step or command than {request.where}; give its --step "
                f"({about.name} has it), another --out, or --overwrite"
            )
        if not (is_own and sound.exists()):
            missing.append(request)
    return missing
