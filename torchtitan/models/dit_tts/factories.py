"""A user's own functions by name: package.module:factory, or package.module:factory:ARGUMENT."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchtitan.models.dit_tts.errors import InputError, failure_state, first_line


def is_factory(spec: str) -> bool:
    """True if a name has the form of a user's function."""
    module, colon, rest = spec.partition(":")
    names = [*module.split("."), rest.partition(":")[0]]
    return bool(colon) and all(part.isidentifier() for part in names)


def call_factory(
    spec: str, device: str, kind: str, known: str, members: Sequence[str], protocol: str
) -> Any:
    """Return the object that factory(device) or factory(device, argument) makes.

    Args:
        kind, known: what it makes, and the names of the program's own, for messages.
        members: what the result must have; `protocol` is the file that says so.
    """
    factory, *argument = find_factory(spec, kind, known)
    made = failures_named(kind, spec)(factory)(device, *argument)
    missing = [each for each in members if not hasattr(made, each)]
    if missing:
        raise InputError(
            f"the {kind} of '{spec}' lacks {', '.join(missing)}; see {protocol} for what it needs"
        )
    return made


def find_factory(spec: str, kind: str, known: str) -> tuple[Any, ...]:
    """The function of this name, and its argument, if there is one."""
    if not is_factory(spec):
        raise InputError(f"'{spec}' names no {kind}; use {known} or package.module:factory")
    module, _, rest = spec.partition(":")
    name, colon, argument = rest.partition(":")
    folder = os.getcwd()  # the console script does not look there
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        factory = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise InputError(
            f"the {kind} '{spec}' cannot be imported ({error}); take {known} or a function that Python can import"
        ) from error
    return (factory, argument) if colon else (factory,)


@contextmanager
def failures_named(kind: str, spec: str) -> Iterator[None]:
    """Turns an exception of a user's code into an InputError; without memory a run has a state of its own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or failure_state(error) == "oom":
            raise
        raise InputError(
            f"the {kind} '{spec}' failed ({type(error).__name__}: {first_line(error)}); mend it "
            "(TITAN_TTS_TRACEBACK=1 shows the line)"
        ) from error
