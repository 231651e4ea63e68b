"""Rules for configs that name functions to call."""

from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.factories import is_factory

_SHIPPED = {
    "samples.recognizer": (
        "words:",
        "whisper-tiny.en",
        "whisper-base",
        "whisper:",
        "faster-whisper:",
    ),
    "samples.speaker_scorer": ("own", "resemblyzer", "xvector:"),
    "samples.opinion": ("dnsmos",),
}
"""Key -> our own scorers, which are no function of a user's; anything may follow a colon"""


def chosen_scorer(name: str, given: str, of_run: str) -> str:
    """Return the name of a scorer: `given` on the command line, else that of the run's [samples] `name`, which must
    not be package.module:factory: a folder that is read may be a stranger's."""
    if not given:
        _refuse_function(f"samples.{name}", of_run, "the run", f"give --{name.replace('_', '-')}")
    return given or of_run


def refuse_function_as_codec(codec: str, where: str, option: str) -> None:
    """Raises InputError where a config that was read, which may be a stranger's, names a function as its codec."""
    _refuse_function("sampling.codec", codec, where, f"give {option}")


def check_export_runs_nothing(sections: dict[str, Any], path: str) -> None:
    """Raises InputError where a config that lies in an exported folder, which may be a stranger's, names a
    function to call."""
    for key in (*_SHIPPED, "sampling.codec"):
        section, _, name = key.partition(".")
        values = sections.get(section)
        given = values.get(name) if isinstance(values, dict) else None
        if isinstance(given, str):
            _refuse_function(key, given, path, f"remove the line, and give --{key}")


def _refuse_function(key: str, given: str, where: str, remedy: str) -> None:
    kind, colon, _ = given.partition(":")
    runs = is_factory(given) if key == "sampling.codec" else given != ""
    if runs and kind + colon not in _SHIPPED.get(key, ()):
        section, _, name = key.partition(".")
        raise InputError(
            f"{where}: [{section}] {name} = {given!r} is a function, which is not run because a loaded folder names it; "
            f"if you trust it {remedy} {given}"
        )
