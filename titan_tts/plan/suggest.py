"""`titan-tts plan --suggest`: layouts, checkpointing and micro-batches of a config compared by the plan.

Times are arithmetic, memory needs passes over the model: it is computed from the fastest layout on, until
enough of them fit.
"""

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from tqdm import tqdm

from titan_tts.plan.activations import ActivationMemory
from titan_tts.plan.devices import ACCELERATOR, Cluster, check_device
from titan_tts.plan.memory import MemoryNeed, memory_need
from titan_tts.plan.plan import estimated_buckets
from titan_tts.plan.planner import Batches, Planner, TimedStep
from titan_tts.plan.states import DataParallelLayout
from titan_tts.plan.step_time import Factor
from titan_tts.report.words import aligned
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig, Megatron
from torchtitan.models.dit_tts.config.manager import without_none
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.run.factors import checkpointing_name

_GIB = 2**30

FITTING_SHOWN = 6

NEGLIGIBLE, SEARCHED = 1.01, 1.05
"""ratios to the fastest step up to which the simpler layout is preferred, and up to which a fit is searched for"""

_TENSOR_DEGREES = (1, 2, 4, 8)

Settings = dict[str, dict[str, Any]]
"""section -> key -> value"""


@dataclass(frozen=True)
class Layout:
    name: str
    degrees: DataParallelLayout
    settings: Settings

    @property
    def complexity(self) -> tuple[int, bool, int]:
        """HSDP's degrees have to fit the nodes."""
        hybrid = self.degrees.sharded and self.degrees.replicas > 1
        return self.degrees.tensor, hybrid, self.name.count(",")


@dataclass(frozen=True, kw_only=True)
class Choice(TimedStep):
    """A layout with checkpointing and a micro-batch, and its step in the longest bucket. Memory is that of the bucket
    that needs the most, where it was computed."""

    layout: Layout
    settings: Settings
    config: JobConfig
    memory: MemoryNeed | None = None

    def row(self) -> dict[str, str]:
        assert self.memory is not None
        mfu, batches = self.mfu, self.batches
        return {
            "layout": self.layout.name,
            "checkpointing": checkpointing_name(asdict(self.config.activation_checkpoint)),
            "micro-batch x steps": f"{batches.micro_batch} x {batches.accumulation}",
            "MFU": f"{mfu.estimate:.1%} ({mfu.low:.1%} to {mfu.high:.1%})",
            "step ms": f"{self.seconds.estimate * 1e3:,.0f}",
            "exposed ms": f"{self.time['exposed communication'] * 1e3:,.1f}",
            "GiB": f"{self.memory.total / _GIB:.1f}",
        }


@dataclass(frozen=True)
class Suggestion:
    best: Choice
    fitting: list[Choice]
    """the fastest of each layout, in the order of their times"""

    others: dict[str, str]
    """layout -> why it loses"""


def layouts(config: JobConfig, cluster: Cluster) -> Iterator[Layout]:
    """Tensor parallelism within a node; shards that fill a part of a node or several nodes; replicas."""
    args = model_flavors()[config.model.flavor]
    shared = math.gcd(args.n_heads, args.mlp_dim, cluster.gpus_per_node)
    for tensor in (degree for degree in _TENSOR_DEGREES if shared % degree == 0):
        ranks, in_node = cluster.gpus // tensor, cluster.gpus_per_node // tensor
        layers = replace(config.megatron, sequence_parallel=False)
        megatron = tensor > 1 or layers != Megatron()
        for shards in range(1, ranks + 1):
            if ranks % shards or (in_node % shards and shards % in_node):
                continue
            degrees = DataParallelLayout(ranks // shards, shards, tensor)
            for kept, divided in itertools.product((False, True), repeat=2):
                if (kept and not degrees.sharded) or (divided and tensor == 1):
                    continue
                name = f"{degrees.name} {degrees.replicas} x {shards}"
                name += ", kept gathered" * kept + ", SP" * divided
                keys = {
                    "backend": "megatron" if megatron else "torchtitan",
                    "tensor_parallel_degree": tensor,
                    "data_parallel_replicate_degree": degrees.replicas,
                    "data_parallel_shard_degree": -1 if degrees.replicas == 1 else shards,
                    "fsdp_reshard_after_forward": "never" if kept else "default",
                }
                sequence = {"sequence_parallel": divided}
                yield Layout(name, degrees, {"parallelism": keys, "megatron": sequence})


def with_settings(config: JobConfig, settings: Settings) -> JobConfig:
    changed = {name: replace(getattr(config, name), **keys) for name, keys in settings.items()}
    return replace(config, **changed)


class _Comparison:
    """Choices of all layouts on a cluster; the passes of one serve the others."""

    def __init__(self, config: JobConfig, cluster: Cluster, factor: Factor):
        self.config, self.cluster, self.factor = config, cluster, factor
        self.samples = config.training.global_batch_size
        self.planners: dict[int, Planner] = {}

    def choices(self, layout: Layout) -> list[Choice]:
        """The fastest first. Raises InputError where training would refuse each."""
        ranks = layout.degrees.gpus // layout.degrees.tensor
        samples, rest = divmod(self.samples, ranks)
        require(not rest, f"{self.samples} samples for {ranks} data-parallel ranks")
        kinds: list[dict[str, Any]] = [{"mode": "none"}, {"mode": "full"}]
        if blocks_compiled(self.config):
            kinds.append({"mode": "memory_budget", "memory_budget": 0.9})
        found, refused = [], None
        for steps in (number for number in range(1, samples + 1) if samples % number == 0):
            training = {"local_batch_size": 0, "max_local_batch_size": samples // steps}
            for kind in kinds:
                settings = {**layout.settings, "activation_checkpoint": kind, "training": training}
                try:
                    found.append(self._choice(layout, settings, steps))
                except InputError as error:
                    refused = refused or error
        if refused and not found:
            raise refused
        return sorted(found, key=lambda choice: choice.seconds.estimate)

    def _choice(self, layout: Layout, settings: Settings, steps: int) -> Choice:
        config, degrees = with_settings(self.config, settings), layout.degrees
        validate_config(config, degrees.gpus, list(model_flavors()), ACCELERATOR)
        planner = self.planners.get(degrees.tensor) or Planner(config, degrees.gpus)
        self.planners[degrees.tensor] = planner
        samples = settings["training"]["max_local_batch_size"]
        batches = Batches(planner.longest.lengths, samples, steps)
        step = planner.timed(config, self.cluster, self.factor, batches)
        return Choice(**vars(step), layout=layout, settings=settings, config=config)

    def memory(self, choice: Choice) -> MemoryNeed:
        """As in the plan of just this choice; a lower bound where less does not fit either."""
        batches, device, config = choice.batches, self.cluster.device, choice.config
        planner = copy.copy(self.planners[choice.layout.degrees.tensor])
        planner.activations = planner.activations.near(batches.micro_batch)
        need = memory_need(planner.states(config).on_gpu, ActivationMemory(0, 0, 0), device)
        shapes = [batches, *(each for _, each in estimated_buckets(config, planner.ranks))]
        options = config.activation_checkpoint
        # Passes of full checkpointing serve every micro-batch, passes of a budget only their own.
        for mode in dict.fromkeys(["full", options.mode]):
            if need.fits:
                config = replace(config, activation_checkpoint=replace(options, mode=mode))
                needs = [planner.memory(config, device, each) for each in shapes]
                need = max(needs, key=lambda each: each.total)
        return need


def suggest(config: JobConfig, cluster: Cluster, factor: Factor) -> Suggestion:
    """The fastest choice of each layout that fits, and of all the simplest within `NEGLIGIBLE` of the fastest. Raises
    InputError where none fits."""
    check_device(config, cluster.device)
    total = config.training.global_batch_size
    require(total > 0, f"[training] global_batch_size = {total}, but --suggest divides it; set it")
    comparison = _Comparison(config, cluster, factor)
    choices: dict[str, list[Choice]] = {}
    others: dict[str, str] = {}
    for layout in tqdm(list(layouts(config, cluster)), "timing", unit="layout", disable=None):
        try:
            choices[layout.name] = comparison.choices(layout)
        except InputError as error:
            others[layout.name] = str(error)
    fitting: list[Choice] = []
    fastest = math.inf
    ordered = sorted(choices.items(), key=lambda item: item[1][0].seconds.estimate)
    slower: dict[str, Choice] = {}
    for name, found in tqdm(ordered, "memory", unit="layout", disable=None):
        least = math.inf
        for choice in found:
            ratio = SEARCHED if len(fitting) < FITTING_SHOWN else NEGLIGIBLE
            if choice.seconds.estimate > ratio * fastest:
                slower[name] = choice
                break
            need = comparison.memory(choice)
            if need.fits:
                fitting.append(replace(choice, memory=need))
                fastest = min(fastest, choice.seconds.estimate)
                break
            least = min(least, need.total)
        else:
            others[name] = f"does not fit: {least / _GIB:.1f} of {need.capacity / _GIB:.1f} GiB"
    if not fitting:
        reasons = "; ".join(f"{name}: {why}" for name, why in others.items())
        raise InputError(
            f"no layout of {config.job.config_file} fits {cluster.gpus} GPUs: {reasons}"
        )
    fitting.sort(key=lambda choice: choice.seconds.estimate)
    near = [choice for choice in fitting if choice.seconds.estimate <= NEGLIGIBLE * fastest]
    best = min(near, key=lambda choice: choice.layout.complexity)
    for choice in (each for each in fitting if each is not best):
        why = "no more than 1 % faster" if choice in near else _loses(choice, best)
        others[choice.layout.name] = why
    for name, choice in slower.items():
        others[name] = f"at most {choice.mfu.estimate:.1%}: {_loses(choice, best)}"
    return Suggestion(best, fitting, others)


def _loses(choice: Choice, best: Choice) -> str:
    """The part of a step that takes the most more."""
    more = {name: seconds - best.time[name] for name, seconds in choice.time.items()}
    name = max(more, key=lambda each: more[each])
    again = choice.config.activation_checkpoint.mode == "full"
    what = "recomputation" if again and name == "matmuls and attention" else name
    return f"{what} {1e3 * more[name]:+,.1f} ms"


def suggestion_lines(found: Suggestion, cluster: Cluster) -> list[str]:
    """A table of the layouts that fit, why each other one loses, and the keys of the best."""
    config, rows = found.best.config, [choice.row() for choice in found.fitting]
    return [
        f"{config.job.config_file}: flavor {config.model.flavor}, {cluster.nodes} x "
        f"{cluster.gpus_per_node} {cluster.device.name}, {config.training.global_batch_size} samples a step",
        *aligned([list(rows[0]), *(list(row.values()) for row in rows)]),
        "",
        f"why others lose to {found.best.layout.name}:",
        *(f"  {name}: {why}" for name, why in found.others.items()),
        "",
        *tomli_w.dumps(found.best.settings).splitlines(),
    ]


def write_suggestion(path: Path, given: JobConfig, found: Suggestion, cluster: Cluster) -> None:
    """Writes the config with the best layout as TOML, without what is a default. `given`: as the
    user gave it, not resolved: its paths stay relative.
    """
    keys = asdict(with_settings(given, found.best.settings))
    content = _changed(without_none(keys), without_none(asdict(JobConfig())))
    content.get("job", {}).pop("config_file", None)
    title, *table = suggestion_lines(replace(found, fitting=[found.best]), cluster)[:3]
    comment = [f"# By titan-tts plan --suggest of {title}", *(f"#   {row}" for row in table)]
    write_atomic(path, "\n".join([*comment, "", tomli_w.dumps(content)]))


def _changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Nested entries that differ from the defaults."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            value = _changed(value, defaults[key]) or defaults[key]
        if value != defaults.get(key):
            found[key] = value
    return found
