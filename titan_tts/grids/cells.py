"""The runs of a grid: what each changes in the base config, its factors and its name."""

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from titan_tts.grids.grid_file import AUTO, AXES, GridFile, Options, combinations, flat
from torchtitan.models.dit_tts.config.checks import validate_config, validate_machine
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import config_from_dict, load_config, resolve
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.run.factors import FACTORS, factors

WARM_UP_STEPS = 3
"""per shape of mixed lengths"""

_LAYOUTS = ("ddp", "fsdp", "hsdp")
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    name: str
    """of its folder; nothing is read from it"""

    axes: dict[str, Any]
    repeat: int
    config: JobConfig
    factors: dict[str, Any]
    """of `run.factors`, and the other axes"""

    refused: str
    """the sentence with which training would refuse the config; empty where it starts"""

    @cached_property
    def content(self) -> dict[str, Any]:
        """The config as nested dictionaries."""
        return asdict(self.config)

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder) / self.config.job.experiment

    @property
    def gpus(self) -> int:
        return self.factors["gpus"]

    @property
    def nodes(self) -> int:
        return self.factors["nodes"]

    @property
    def steps(self) -> int:
        """Steps of the run, including the warm-up."""
        return self.config.benchmark.warmup_steps + self.config.benchmark.steps

    @property
    def group(self) -> str:
        """The same for runs that differ only in batch and repeat."""
        return repr({axis: value for axis, value in self.axes.items() if axis != "batch"})

    @property
    def batch(self) -> int:
        """Samples of the longest bucket on one rank; 0: still to be found."""
        batch = self.factors["batch"]
        return 0 if batch == AUTO else int(batch)


class Cells:
    """The runs of a grid, each with a folder in `folder`."""

    def __init__(self, grid: GridFile, folder: Path):
        self.grid = grid
        self.folder = folder
        self._bases: dict[str, dict[str, Any]] = {}

    def all(self) -> list[Cell]:
        """Every run, grouped and by growing batch, the first repeat of all before the second of any."""
        repeats = range(self.grid.grid.repeats)
        found = [self.make(axes, n) for n in repeats for axes in combinations(self.grid)]
        for name, count in Counter(cell.name for cell in found).items():
            require(
                count == 1,
                f"[grid] {self.grid.grid.name}: two runs have the same name, {name}; give them other "
                f"values, also those of [[extra]]",
            )
        groups = list(dict.fromkeys(cell.group for cell in found))
        return sorted(found, key=lambda c: (c.repeat, groups.index(c.group), c.batch))

    def make(
        self,
        axes: dict[str, Any],
        repeat: int,
        batch: int | None = None,
        settings: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> Cell:
        """A run with these values of the axes; `batch` replaces the axis's "auto", and `settings` win over the
        grid's. `folder`: by default in the grid's, by the run's name."""
        options = self.grid.grid
        chosen = axes if batch is None else {**axes, "batch": batch}
        gpus = _whole("gpus", chosen.get("gpus", options.gpus))
        base = chosen.get("size", options.config)
        tensor = self._tensor_degree(base, chosen)
        config = self._config(
            base,
            {
                "benchmark.enable": True,
                "benchmark.lengths": options.lengths,
                "metrics.enable_tensorboard": False,
                **_steps(options),
                **flat(self.grid.settings),
                **_axis_settings(chosen, max(1, gpus // tensor), -(-gpus // options.gpus_per_node)),
                **{key: value for key, value in chosen.items() if key not in AXES},
                **(settings or {}),
            },
        )
        found: dict[str, Any] = dict(factors(asdict(config), gpus, options.gpus_per_node))
        refused = self._refusal(config, gpus)
        if chosen.get("batch") == AUTO:
            found["batch"] = AUTO
        layout, parallelism = str(chosen.get("layout", "")), config.parallelism
        degrees = (
            parallelism.data_parallel_replicate_degree,
            parallelism.data_parallel_shard_degree,
        )
        named = ""
        if layout in _LAYOUTS:
            if layout != found["layout"] or prod(degrees) * tensor != gpus:
                refused = f"{gpus} GPUs have no layout {layout}"
                found["layout"] = layout
            named = f"_{layout}" if refused else ""
        found |= {axis: value for axis, value in axes.items() if axis not in AXES}
        name = _name(degrees, found, repeat if options.repeats > 1 else None) + named
        folder = folder or self.folder / name
        placed = replace(config.job, dump_folder=str(folder.parent), experiment=folder.name)
        return Cell(name, axes, repeat, replace(config, job=placed), found, refused)

    def _refusal(self, config: JobConfig, gpus: int) -> str:
        """The sentence with which training would refuse a config; empty where it starts."""
        per_node = self.grid.grid.gpus_per_node
        if gpus > per_node and gpus % per_node:
            return f"{gpus} GPUs are no whole number of nodes of {per_node}"
        try:
            validate_config(config, gpus, list(model_flavors()))
            validate_machine(config)
        except InputError as error:
            return str(error)
        return ""

    def _base(self, base: str) -> dict[str, Any]:
        if base not in self._bases:
            path = find_config(str(base))
            self._bases[base] = asdict(load_config(["--job.config_file", str(path)]))
        return self._bases[base]

    def _tensor_degree(self, base: str, chosen: Mapping[str, Any]) -> int:
        """GPUs that share the samples of a data-parallel rank."""
        key = "parallelism.tensor_parallel_degree"
        own = self._base(base)["parallelism"]["tensor_parallel_degree"]
        return _whole(key, {key: own, **flat(self.grid.settings), **chosen}[key])

    def _config(self, base: str, settings: Mapping[str, Any]) -> JobConfig:
        content, where = deepcopy(self._base(base)), f"[grid] {self.grid.grid.name}"
        for key, value in settings.items():
            *sections, name = key.split(".")
            table = content
            for section in sections:
                table = table.setdefault(section, {})
                require(isinstance(table, dict), f"{where}: there is no key {key}")
            table[name] = value
        return resolve(config_from_dict(content, where))


def _steps(options: Options) -> dict[str, Any]:
    if options.lengths == "mixed":
        return {"benchmark.steps": options.steps, "benchmark.warmup_steps": WARM_UP_STEPS}
    warm_up = options.steps - options.counted_steps
    return {"benchmark.steps": options.counted_steps, "benchmark.warmup_steps": warm_up}


def _axis_settings(axes: Mapping[str, Any], ranks: int, nodes: int) -> dict[str, Any]:
    """The config keys that the axes of AXES stand for; ranks: data-parallel ones."""
    settings: dict[str, Any] = {}
    if "layout" in axes:
        replicas, shards = _degrees(axes["layout"], ranks, nodes)
        settings["parallelism.data_parallel_replicate_degree"] = replicas
        settings["parallelism.data_parallel_shard_degree"] = shards
    if "batch" in axes:
        batch = 1 if axes["batch"] == AUTO else _whole("batch", axes["batch"])
        steps = _whole("accumulation", axes.get("accumulation", 1))
        settings["training.local_batch_size"] = batch
        settings["training.global_batch_size"] = batch * ranks * steps
        settings["data.batch_multiple"] = ranks * steps
    elif "accumulation" in axes:
        raise InputError("[axes] accumulation needs an axis batch; add one")
    if "checkpointing" in axes:
        settings |= _checkpointing(axes["checkpointing"])
    if (mode := axes.get("compile")) is not None:
        settings["compile.enable"] = mode != "off"
        settings |= {} if mode == "off" else {"compile.mode": mode}
    if (precision := axes.get("precision")) is not None:
        if precision not in _PRECISIONS:
            raise _mistake("precision", precision, f"allowed are {', '.join(_PRECISIONS)}")
        settings["training.mixed_precision_param"] = _PRECISIONS[precision]
        settings["model.converters"] = ["float8"] if precision == "fp8" else []
    if "attention" in axes:
        settings["attention.backend"] = axes["attention"]
    return settings


def _mistake(axis: str, value: Any, words: str) -> InputError:
    return InputError(f"[axes] {axis} has {value!r}, but {words}")


def _whole(axis: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**6:
        raise _mistake(axis, value, "it must be a whole number above 0")
    return value


def _degrees(layout: Any, ranks: int, nodes: int) -> tuple[int, int]:
    """(replicas, shards) of a layout. HSDP shards within a node, or in two parts on one node."""
    if layout in _LAYOUTS:
        replicas = {"ddp": ranks, "fsdp": 1, "hsdp": nodes if nodes > 1 else 2}[layout]
        return replicas, max(1, ranks // replicas)
    if degrees := re.fullmatch(r"(\d{1,6})x(\d{1,6})", str(layout)):
        return int(degrees[1]), int(degrees[2])
    raise _mistake(
        "layout", layout, "allowed are ddp, fsdp, hsdp, and RxS for R replicas of S shards"
    )


def _checkpointing(value: Any) -> dict[str, Any]:
    """Keys of [activation_checkpoint], whose names in a word `run.factors` gives."""
    pattern = r"(none|full)|(op)|every (\d+)|memory_budget ([01](?:\.\d+)?)"
    if not (found := re.fullmatch(pattern, str(value))):
        words = "allowed are none, full, op, 'every N' and 'memory_budget F'"
        raise _mistake("checkpointing", value, words)
    mode, op, every, budget = found.groups()
    key = "activation_checkpoint"
    if budget:
        return {f"{key}.mode": "memory_budget", f"{key}.memory_budget": float(budget)}
    option = {} if mode else {f"{key}.selective_ac_option": op or every}
    return {f"{key}.mode": mode or "selective", **option}


def _name(degrees: tuple[int, int], found: Mapping[str, Any], repeat: int | None) -> str:
    """The run's name, as the project's predecessor had it; ps is the patch size of the latents, always 1."""
    replicas, shards = degrees
    if shards < 0:
        shards = found["gpus"] // found["tensor_parallel"] // replicas
    parts = [
        f"dit_{found['size']}_bs{found['batch']}_ps1_act{found['checkpointing']}_c{found['compile']}",
        f"{found['precision']}_p{replicas}x{shards}",
        "" if found["tensor_parallel"] == 1 else f"tp{found['tensor_parallel']}",
        "" if found["accumulation"] == 1 else f"acc{found['accumulation']}",
        "" if found["attention"] == "auto" else str(found["attention"]),
        *(f"{key.rpartition('.')[2]}{value}" for key, value in found.items() if key not in FACTORS),
    ]
    name = re.sub(r"[^\w.=-]+", "-", "_".join(filter(None, parts)))[:200]
    return name if repeat is None else f"{name}_r{repeat}"
