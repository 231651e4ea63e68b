"""Options that `titan-tts serve` and `titan-tts demo` share."""

import os
from dataclasses import dataclass, field

import tyro

from titan_tts.speak.sampling_options import SamplingOptions
from torchtitan.models.dit_tts.errors import check_range, require


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

    max_characters: int = 4096
    """Longest text of a request."""


def check_server_options(options: ServerOptions) -> None:
    """Raises InputError for mistakes that show without the model."""
    check_range("--port", options.port, 0, 2**16 - 1)
    check_range("--max-characters", options.max_characters, 1, 10**6)
    names = [given.partition("=")[0] for given in options.voice]
    for name, given in zip(names, options.voice, strict=True):
        path = given.partition("=")[2]
        require(bool(name and path), f"--voice = {given}, but it must be NAME=FILE")
        require(names.count(name) == 1, f"--voice = {given}, but {name} is given twice")
        exist = all(map(os.path.isfile, voice_parts(path)[1]))
        require(exist, f"--voice = {given}, but there is no such file")


def voice_parts(path: str) -> tuple[str, list[str]]:
    """(folder of an adapter, recordings) of FILE, FILE,FILE, FOLDER or FOLDER,FILE."""
    parts = [path] if os.path.exists(path) else path.split(",")
    folder = parts.pop(0) if os.path.isdir(parts[0]) else ""
    return folder, parts
