"""Help on the keys of a config: those that this family uses, or all."""

import copy
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any

import tyro

from torchtitan.config.manager import custom_registry
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import declared
from torchtitan.models.dit_tts.config.manager import TTSConfigManager
from torchtitan.models.dit_tts.config.marks import OFF, UNUSED
from torchtitan.models.dit_tts.config.options import read_options

_DESCRIPTION = """Trains a model. Every key of the TOML file is an option here, --section.key value; an
option wins over the file. --dry-run trains nothing: it prints parameters, memory per GPU, downloads and
the arithmetic of a step (--dry-run --nproc N). """


def print_help(every_key: bool) -> int:
    """Prints the keys with their types, defaults and sentences; `every_key`: also the unused ones."""
    TTSConfigManager()  # registers how lists are read and shown
    kinds: dict[str, Any] = {each.name: each.type for each in fields(JobConfig)}
    if not every_key:
        kinds = {name: _used_part(name, kinds[name]) for name in JobConfig.__annotations__}
    config = make_dataclass(
        "Config", [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()]
    )
    rest = (
        "" if every_key else "--help-all also lists upstream's keys that this family does not use."
    )
    read_options(config, custom_registry, description=_DESCRIPTION + rest, args=["--help"])
    return 0


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
