"""Help on the keys of a config: those that this family uses, or all."""

import copy
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any

import tyro

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import declared
from torchtitan.models.dit_tts.config.marks import OFF, UNUSED
from torchtitan.models.dit_tts.config.options import read_options

_DESCRIPTION = """Trains a model. Every key of the TOML file is an option here, --section.key value; an
option wins over the file. --dry-run trains nothing: it prints parameters, memory per GPU, downloads and
the arithmetic of a step (--dry-run --nproc N). """


def print_help(every_key: bool) -> int:
    """Prints the keys with their types, defaults and sentences; `every_key`: also the unused ones."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_list)
    kinds: dict[str, Any] = {each.name: each.type for each in fields(JobConfig)}
    if not every_key:
        kinds = {name: _used_part(name, kinds[name]) for name in JobConfig.__annotations__}
    config = make_dataclass(
        "Config", [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()]
    )
    rest = (
        "" if every_key else "--help-all also lists upstream's keys that this family does not use."
    )
    read_options(config, registry, description=_DESCRIPTION + rest, args=["--help"])
    return 0


def _list(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """How a list is shown: with commas between its elements, as `read_value` takes it."""
    if info.type not in (list[str], list[int], list[float], str | list[str]):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,C,...",
        instance_from_str=lambda args: args[0],
        is_instance=lambda value: isinstance(value, str | list),
        str_from_instance=lambda value: [
            value if isinstance(value, str) else ",".join(map(str, value))
        ],
    )


def _used_part(section: str, kind: Any) -> Any:
    """`kind` with the unused keys hidden; a subclass, so that tyro finds the fields' docstrings."""
    hidden = {name for name, given in declared() if given & {OFF, UNUSED}}
    shown = []
    for each in fields(kind):
        name = f"{section}.{each.name}"
        keys = {key for key, _ in declared(each.type, name)} if is_dataclass(each.type) else {name}
        if keys <= hidden:
            # A copy: making a dataclass writes the type into the field that it is given.
            shown.append((each.name, Annotated[each.type, tyro.conf.Suppress], copy.copy(each)))
        elif is_dataclass(each.type):
            inner = _used_part(name, each.type)
            shown.append((each.name, inner, field(default_factory=inner)))
    return make_dataclass(kind.__name__, shown, bases=(kind,)) if shown else kind
