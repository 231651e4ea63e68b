"""Options that `titan-tts serve` and `titan-tts demo` share."""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tyro

from titan_tts.speak.sampling_options import SamplingOptions
from torchtitan.models.dit_tts.errors import InputError, check_range

if TYPE_CHECKING:
    from titan_tts.speak.synthesizer import Synthesizer
    from titan_tts.speak.utterance import Voice


@dataclass(kw_only=True)
class ServerOptions(SamplingOptions):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 also serves other machines."""

    port: int = 8000
    """Port to listen on; 0: a free one, which is printed."""

    voice: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """NAME=FILE: a voice from a recording, in addition to the speakers (NAME=FILE,FILE: from one of each turn's
    speaker); NAME=FOLDER or NAME=FOLDER,FILE: with an adapter that `titan-tts export --adapter` wrote; may be
    repeated."""


def check_server_options(options: ServerOptions) -> None:
    """Raises InputError for mistakes that show without the model."""
    check_range("--port", options.port, 0, 2**16 - 1)
    for given in options.voice:
        name, equals, path = given.partition("=")
        if not (name and equals):
            raise InputError(f"--voice = {given}, but it must be NAME=FILE")
        if sum(each.startswith(f"{name}=") for each in options.voice) > 1:
            raise InputError(f"--voice = {given}, but {name} is given twice")
        if not all(map(os.path.isfile, _parts(path)[1])):
            raise InputError(f"--voice = {given}, but there is no such file")


def _parts(path: str) -> tuple[str, list[str]]:
    """(folder of an adapter, recordings) of FILE, FILE,FILE, FOLDER or FOLDER,FILE."""
    parts = [path] if os.path.exists(path) else path.split(",")
    folder = parts.pop(0) if os.path.isdir(parts[0]) else ""
    return folder, parts


def load_served(options: ServerOptions) -> "tuple[Synthesizer, dict[str, Voice]]":
    """The model, and the voices of --voice by name."""
    from titan_tts.speak.sampling_options import load_synthesizer

    synthesizer = load_synthesizer(options)
    _ = synthesizer.lengths  # a missing predictor or fit is told now, not at the first request
    voices: dict[str, Voice] = {}
    for given in options.voice:
        name, _, path = given.partition("=")
        folder, files = _parts(path)
        voices[name] = (
            synthesizer.adapted(name, folder, files) if folder else synthesizer.recording(files)
        )
    return synthesizer, voices
