"""A command line against the fields that it sets: one sentence for a mistake, before tyro has a box of lines."""

import dataclasses
import difflib
import io
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructTypeInfo,
)

from torchtitan.models.dit_tts.errors import InputError

_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}

# Where tyro's script of a completion knows no word it replaces what was typed by nothing; files are better.
_COMPLETION = {
    "matches+=(": '[ -z "$completion" ] || matches+=(',
    "complete -F": "complete -o default -F",
    "completion_array+=(": '[ -z "$completion" ] || completion_array+=(',
    "completions' completion_array": "completions' completion_array || _files",
}


def read_options(kind: Any, registry: ConstructorRegistry, **given: Any) -> Any:
    """Parse a command line with tyro. All lines of its help fit into the terminal: it wraps those in boxes."""
    registry.struct_rule(_with_joined_help)
    output = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding, "backslashreplace")
    output.isatty = sys.stdout.isatty  # type: ignore[method-assign]  # for colours
    try:
        with redirect_stdout(output):
            return tyro.cli(kind, registry=registry, **given)
    finally:
        output.seek(0)
        *about, rest = output.read().split("\n\n")
        plain = [re.sub("\x1b\\[[0-9;]*m", "", each) for each in about]
        if plain and plain[0].startswith("usage: "):
            plain[0] = re.sub(r"(?<=\w),(?=\w)", ", ", plain[0])
            width = shutil.get_terminal_size().columns
            about = [textwrap.fill(each, width, break_on_hyphens=False) for each in plain]
        text = "\n\n".join([*about, rest])
        for its, ours in _COMPLETION.items():
            text = text.replace(its, ours)
        sys.stdout.write(text)


def _with_joined_help(info: StructTypeInfo) -> Any:
    """tyro's reading of a dataclass, with the lines of each field's docstring joined. tyro keeps the breaks before
    indented lines, and a shell completes to what follows one."""
    if not dataclasses.is_dataclass(info.type) or _with_joined_help in info.markers:
        return None
    marked = dataclasses.replace(info, markers=(*info.markers, _with_joined_help))
    spec = ConstructorRegistry.get_struct_spec(marked)
    if not isinstance(spec, StructConstructorSpec):
        return spec
    fields = [
        dataclasses.replace(each, helptext=partial(_joined, each.helptext)) for each in spec.fields
    ]
    return dataclasses.replace(spec, fields=tuple(fields))


def _joined(text: str | Callable[[], str | None] | None) -> str:
    """A docstring in one line, apart from the items of upstream's lists."""
    return re.sub(r"\s*\n\s*(?!- )", " ", (text() if callable(text) else text) or "")


def option_name(arg: str) -> str:
    """section.key of an argument --section.key[=value]; empty for another."""
    return arg[2:].partition("=")[0].replace("-", "_") if arg.startswith("--") else ""


def option_kinds(cls: Any, sections: bool = False) -> dict[str, Any]:
    """The type of each option that a dataclass has, by its name. `sections`: a nested dataclass's
    fields are named section.key, not by the key alone.
    """
    kinds: dict[str, Any] = {}
    for each in dataclasses.fields(cls):
        if dataclasses.is_dataclass(each.type):
            inner = option_kinds(each.type, sections)
            start = f"{each.name}." if sections else ""
            kinds |= {start + name: kind for name, kind in inner.items()}
        else:
            kinds[each.name] = each.type if _own_reading(each.type) else plain(each.type)
    return kinds


def describe(kind: Any) -> str:
    """Describes the values of a type in words."""
    if spec := _own_reading(kind):
        return " or ".join(
            {"FLOAT": "a number"}.get(each, each) for each in spec.metavar.split("|")
        )
    kind = plain(kind)
    inner = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(repr, inner))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(describe, inner))
    if get_origin(kind) is list:
        return f"a list, each element {describe(inner[0])}"
    return _WORDS.get(kind, "a text")


def read_command_line(
    args: list[str], kinds: Mapping[str, Any], instead: Mapping[str, str], help_command: str
) -> tuple[dict[str, Any], list[str]]:
    """(value of each option by its name, arguments without one). --section.no-key sets a key to false.

    Args:
        kinds: the types of all options.
        instead: what to write for a key that does not exist, in any section.
        help_command: what lists the options.
    """
    found: dict[str, Any] = {}
    alone = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            alone.append(arg)
            continue
        option, equals, value = arg.partition("=")
        name = option_name(option)
        positive = name.replace(".no_", ".")
        is_off = name not in kinds and kinds.get(positive) is bool
        kind = bool if is_off else kinds.get(name)
        if kind is None:
            close = difflib.get_close_matches(name, kinds, n=1)
            near = [each if "." in each else each.replace("_", "-") for each in close]
            hint = instead.get(name.rpartition(".")[2].removeprefix("no_")) or (
                f"did you mean --{near[0]}?" if near else f"{help_command} lists the options"
            )
            raise InputError(f"unknown option {option}: {hint}")
        if kind is bool and "." not in name:
            if equals:
                raise InputError(f"{option} is a switch and takes no value, but {value!r} is given")
            found[name] = True
            continue
        values = [value] if equals else list(takewhile(lambda each: each[:2] != "--", rest))
        many = get_origin(plain(kind)) is list
        if not many:
            del values[1:]
        if not equals:
            del rest[: len(values)]
        if kind is bool:
            found[positive] = read_value(option, values or ["true"], kind) != is_off
        elif values or many:
            found[name] = read_value(option, values, kind)
        else:
            raise InputError(f"{option} has no value, but it must be {describe(kind)}")
    return found, alone


def _own_reading(kind: Any) -> PrimitiveConstructorSpec | None:
    """The parser that a type brings with it."""
    metadata = getattr(kind, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, PrimitiveConstructorSpec)), None)


def plain(kind: Any) -> Any:
    """A type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def read_value(option: str, texts: list[str], kind: Any) -> Any:
    """The value of a type that texts give: one, or the elements of a list, which may have commas between them.
    Raises InputError where they do not."""
    element = _own_reading(kind) or plain(kind)
    try:
        if get_origin(element) is list:
            (element,) = get_args(element)
            return [_value(each, element) for text in texts for each in text.split(",") if each]
        return _value(texts[0], element)
    except ValueError:
        shown = " ".join(texts)
        raise InputError(f"{option} = {shown!r}, but it must be {describe(kind)}") from None


def _value(text: str, kind: Any) -> Any:
    if isinstance(kind, PrimitiveConstructorSpec):
        return kind.instance_from_str([text])
    if get_origin(kind) in (Union, types.UnionType):
        if text == "None" and types.NoneType in get_args(kind):
            return None
        for each in get_args(kind):
            with suppress(ValueError):
                return _value(text, each)
        raise ValueError
    if get_origin(kind) is Literal and text not in get_args(kind) or kind is types.NoneType:
        raise ValueError
    if kind is bool:
        return ["false", "true"].index(text.lower()) == 1  # or ValueError
    return kind(text) if kind in (int, float) else text
