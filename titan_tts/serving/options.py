"""Options of both `titan-tts serve` and `titan-tts demo`."""

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
    """Address to listen at; 0.0.0.0 lets other machines in."""

    port: int = 8000
    """Port to listen at; 0: a free one, which is printed."""

    voice: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """NAME=FILE: a voice of a recording, beside the speakers; may be repeated."""


def check_server_options(options: ServerOptions) -> None:
    """Raises InputError for what can be seen without the model."""
    check_range("--port", options.port, 0, 2**16 - 1)
    for given in options.voice:
        name, equals, path = given.partition("=")
        if not (name and equals):
            raise InputError(f"--voice = {given}, but it must be NAME=FILE")
        if not os.path.isfile(path):
            raise InputError(f"--voice = {given}, but there is no such file")


def known_voices(options: ServerOptions, synthesizer: "Synthesizer") -> "dict[str, Voice]":
    """Those of --voice by their names."""
    pairs = (given.partition("=") for given in options.voice)
    return {name: synthesizer.recording(path) for name, _, path in pairs}
