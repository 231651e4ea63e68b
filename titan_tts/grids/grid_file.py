"""The TOML file of a grid: a base config, axes, exclusions, repeats. docs/ablations.md has an example."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan.models.dit_tts.bounded import read_toml
from torchtitan.models.dit_tts.config.manager import dataclass_from_dict
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote

AXES = (
    *("size", "gpus", "layout", "batch", "accumulation"),
    *("checkpointing", "compile", "precision", "attention"),
)
"""Axes with values of their own; every other axis is a config key, `section.key`. `size` is a config,
`batch` the micro-batch of a rank or "auto": the largest that fits."""

AUTO = "auto"


@dataclass
class Options:
    """`[grid]`."""

    name: str = ""
    """of the grid's folder in dump_folder; empty: the file's name without .toml"""

    config: str = ""
    """path or name of the base config; the axis `size` takes its place"""

    dump_folder: str = "./outputs"
    """the grid's folder is made in it"""

    gpus: int = 1
    """processes of every run, where there is no axis gpus"""

    gpus_per_node: int = 8
    """more than these are several nodes"""

    gpu: str = ""
    """name of the GPU for the plan's forecasts, as in `titan-tts plan --gpu`; empty: this machine's"""

    steps: int = 50
    """of a run; with lengths = "longest" the last `counted_steps` are counted"""

    counted_steps: int = 10
    """with lengths = "longest"; with "mixed" all steps after those of the warm-up are"""

    lengths: Literal["longest", "mixed"] = "longest"
    """of `[benchmark]`"""

    repeats: int = 1
    """of each run; the grid is run through once before it is repeated"""

    timeout_minutes: float = 20.0
    """of a run"""


@dataclass
class GridFile:
    grid: Options = field(default_factory=Options)
    settings: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    exclude: list[dict[str, Any]] = field(default_factory=list)
    extra: list[dict[str, Any]] = field(default_factory=list)


def read_grid(path: Path) -> GridFile:
    try:
        grid: GridFile = dataclass_from_dict(GridFile, read_toml(path), str(path))
        grid.grid.name = grid.grid.name or path.stem
        _check(grid)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a grid's TOML") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid: {error}") from None
    return grid


def _check(grid: GridFile) -> None:
    """Raises ValueError for what no run could be made of."""
    options = grid.grid
    for table in (grid.axes, *grid.extra):
        for axis, values in table.items():
            is_list = isinstance(values, list) or table is grid.axes
            _check_axis(axis, values if is_list else [values])
    names = [name for axis in grid.axes for name in _names(axis)]
    if len(set(names)) < len(names):
        raise ValueError(f"[axes] have {', '.join(names)}, but each must be there once")
    if not options.config and "size" not in names:
        raise ValueError("[grid] config is missing; give a TOML file or a shipped config")
    if is_remote(options.dump_folder):
        raise ValueError(f"[grid] dump_folder = {options.dump_folder!r} must be a local folder")
    for name in ("gpus", "gpus_per_node", "steps", "counted_steps", "repeats", "timeout_minutes"):
        if not 0 < (value := getattr(options, name)) < 10**9:
            raise ValueError(f"[grid] {name} = {value}, but it must be greater than 0")
    if options.lengths == "longest" and options.counted_steps >= options.steps:
        raise ValueError(
            f"[grid] counted_steps = {options.counted_steps} must be less than steps = {options.steps}: the others "
            "are the warm-up"
        )
    combined = _combined(grid.axes)
    for number, table in enumerate(grid.exclude, 1):
        for axis, value in table.items():
            if all(repr(value) != repr(each.get(axis)) for each in combined):  # True is no 1
                raise ValueError(f"[[exclude]] {number} has {axis} = {value!r}, which no axis has")


def _names(axis: str) -> list[str]:
    """The axes that change together in one of the file: "size, layout"."""
    return [name.strip() for name in axis.split(",")]


def _check_axis(axis: str, values: list[Any]) -> None:
    names = _names(axis)
    for name in names:
        if name not in AXES and "." not in name:
            known = f'{", ".join(AXES)}, and keys of the config as "section.key"'
            raise ValueError(f"there is no axis {name!r}; there are {known}")
    if not values or len(set(map(repr, values))) < len(values):
        raise ValueError(f"axis {axis} must have values, each once")
    for row in _rows(axis, values):
        if not isinstance(row, list) or len(row) != len(names):
            raise ValueError(f"axis {axis} has {row}, but it needs a list of {len(names)}")
        if any(isinstance(one, (list, dict)) for name, one in zip(names, row) if name in AXES):
            raise ValueError(f"axis {axis} has {row}, but its values are words or numbers")


def _rows(axis: str, values: Any) -> list[Any]:
    """The values of each of its names; one alone needs no list."""
    listed = values if isinstance(values, list) else [values]
    return listed if "," in axis else [[value] for value in listed]


def _combined(axes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the axes' values."""
    names = [name for axis in axes for name in _names(axis)]
    products = itertools.product(*(_rows(*item) for item in axes.items()))
    return [dict(zip(names, itertools.chain(*rows))) for rows in products]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key -> value; `data.max_frames` and `"data.max_frames"` are the same key."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def combinations(grid: GridFile) -> Iterator[dict[str, Any]]:
    """The values of each run's axes, without repeats, in the order of the axes."""
    combined = _combined(grid.axes)
    for chosen in combined:
        if not any(table.items() <= chosen.items() for table in grid.exclude if table):
            yield chosen
    for table in grid.extra:
        yield from ({**combined[0], **chosen} for chosen in _combined(table))
