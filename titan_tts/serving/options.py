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
    given_voices(options)


def given_voices(options: ServerOptions) -> dict[str, tuple[str, list[str]]]:
    """(folder of an adapter, recordings) of each --voice by its name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for given in options.voice:
        name, _, path = given.partition("=")
        require(bool(name and path), f"--voice = {given}, but it must be NAME=FILE")
        require(name not in found, f"--voice = {given}, but {name} is given twice")
        files = [path] if os.path.exists(path) else path.split(",")
        folder = files.pop(0) if os.path.isdir(files[0]) else ""
        exist = all(map(os.path.isfile, files))
        require(exist, f"--voice = {given}, but there is no such file")
        found[name] = folder, files
    return found
