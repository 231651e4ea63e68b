"""Help on the keys of a config that this family uses."""

import copy
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any

import tyro

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import declared, marked
from torchtitan.models.dit_tts.config.marks import OFF, UNUSED
from torchtitan.models.dit_tts.config.options import read_options

_DESCRIPTION = """Trains a model. Every key of the TOML file is an option here, --section.key value; an
option wins over the file. A list has blanks or commas between its elements. --dry-run trains nothing: it prints
parameters, memory per GPU, downloads and the arithmetic of a step (--dry-run --nproc N)."""


def print_help() -> int:
    """Prints the keys with their types, defaults and sentences."""
    kinds: dict[str, Any] = {each.name: each.type for each in fields(JobConfig)}
    sections = [(name, _used_part(name, kinds[name])) for name in JobConfig.__annotations__]
    config = make_dataclass(
        "Config", [(name, kind, field(default_factory=kind)) for name, kind in sections]
    )
    registry = tyro.constructors.ConstructorRegistry()
    read_options(config, registry, description=_DESCRIPTION, args=["--help"])
    return 0


def _used_part(section: str, kind: Any) -> Any:
    """`kind` with the unused keys hidden; a subclass, so that tyro finds the fields' docstrings."""
    hidden = {*marked(OFF, UNUSED)}
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
