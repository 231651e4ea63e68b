"""Which configs may name functions to call."""

from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.factories import is_factory

_SHIPPED = {
    "recognizer": ("words:", "whisper:", "faster-whisper:"),
    "speaker_scorer": ("own", "resemblyzer", "xvector:"),
    "opinion": ("dnsmos",),
}
"""Key of [samples] -> our own scorers, which are no function of a user's; anything may follow a colon"""


def chosen_scorer(name: str, given: str, of_run: str) -> str:
    """What scores: `given` on the command line, else what the run's [samples] has under `name`, which must
    not be package.module:factory: a folder that is read may be a stranger's."""
    if given or not of_run or is_shipped(name, of_run):
        return given or of_run
    option = name.replace("_", "-")
    raise InputError(
        f"the run's [samples] {name} = {of_run!r} is a function, which is not called because a loaded "
        f"folder names it; if you trust it give --{option} {of_run}, else another --{option}"
    )


def is_shipped(name: str, spec: str) -> bool:
    """True if a spec under a key of [samples] is one of the program's own, and no function of a user's."""
    kind, colon, _ = spec.partition(":")
    return kind + colon in _SHIPPED[name]


def refuse_function_as_codec(codec: str, where: str, option: str) -> None:
    """Raises InputError where a config that was read, which may be a stranger's, names a function as its codec."""
    if is_factory(codec):
        raise InputError(
            f"{where}: [sampling] codec = {codec!r} is a function, which is not called because a loaded folder names "
            f"it; if you trust it give {option} {codec}"
        )


def check_export_runs_nothing(sections: dict[str, Any], path: str) -> None:
    """Raises InputError where a config that lies in an exported folder, which may be a stranger's, names a
    function to call or a folder of compiled code."""
    samples, compiling = sections.get("samples", {}), sections.get("compile", {})
    sampling = sections.get("sampling", {})
    codec = sampling.get("codec") if isinstance(sampling, dict) else None
    if isinstance(codec, str):
        refuse_function_as_codec(codec, path, "--sampling.codec")
    for name in _SHIPPED:
        spec = samples.get(name) if isinstance(samples, dict) else None
        if spec and isinstance(spec, str) and not is_shipped(name, spec):
            raise InputError(
                f"{path}: [samples] {name} = {spec!r} is a function, which is not called because an exported "
                f"folder names it; remove the line, and give it as --samples.{name} if you trust it"
            )
    if isinstance(compiling, dict) and compiling.get("cache_folder"):
        raise InputError(
            f"{path}: [compile] cache_folder is a folder of compiled code, which is not used because an exported "
            f"folder names it; remove the line, and give it as --compile.cache_folder if you trust it"
        )
