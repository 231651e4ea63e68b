"""The config of a run: read from TOML and command line, resolved, and as upstream's trainer sees it."""

import copy
import dataclasses
import difflib
import os
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import typeguard

from torchtitan.models.dit_tts.bounded import read_toml
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.codec_name import from_any_folder
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS, OLD_VALUES, changes_nothing
from torchtitan.models.dit_tts.config.options import (
    describe,
    option_kinds,
    plain,
    read_command_line,
)
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.config.trust import check_export_runs_nothing
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, local_path, shards_in


def _of_type(value: Any, kind: Any) -> bool:
    """Checks every element; a boolean is not a number."""
    try:
        typeguard.check_type(
            value, kind, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        return False
    elements = value if isinstance(value, list) else [value]
    return kind is bool or not any(isinstance(element, bool) for element in elements)


def dataclass_from_dict(cls: Any, values: dict[str, Any], where: str, name: str = "") -> Any:
    """A section (or, without a name, the complete config) from a dictionary; `where` is its file."""
    fields = {f.name: plain(f.type) for f in dataclasses.fields(cls)}
    made = {}
    for key, value in values.items():
        outside = f"section [{key}]" if isinstance(value, dict) else key
        shown = f"[{name}] {key}" if name else outside
        if key not in fields:
            inside = value if isinstance(value, dict) else {key: value}
            section = key if isinstance(value, dict) else name
            if inside and all(changes_nothing(f"{section}.{k}", v) for k, v in inside.items()):
                continue
            close = difflib.get_close_matches(key, fields, n=1)
            hint = OLD_KEYS.get(key) or (
                f"did you mean {close[0]}?" if close else f"allowed are {', '.join(fields)}"
            )
            raise InputError(f"{where}: unknown {shown}: {hint}")
        kind: Any = fields[key]
        value = OLD_VALUES.get(f"{name}.{key} = {value}", value)
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise InputError(
                    f"{where}: {shown} = {value!r} must be a section, [{key}]"
                    + (f": {OLD_KEYS[key]}" if key in OLD_KEYS else "")
                )
            made[key] = dataclass_from_dict(kind, value, where, f"{name}.{key}" if name else key)
        elif _of_type(value, kind):
            made[key] = value
        else:
            raise InputError(f"{where}: {shown} = {value!r}, but it must be {describe(kind)}")
    return cls(**made)


def _split_paths(text: str) -> str | list[str]:
    """Splits at the commas outside braces; an existing path of that very name is one."""
    if os.path.exists(text):
        return text
    paths = re.split(r",(?![^{}]*\})", text)
    return paths if len(paths) > 1 else text


def parse_config(
    args: Sequence[str], sections: dict[str, Any] | None = None, where: str = ""
) -> JobConfig:
    """The config of `--section.key value` arguments over a file's values; not yet resolved.

    Args:
        sections: of a config, instead of those of the file that --job.config_file names; `where`: what messages
            call it.
    """
    kinds = option_kinds(JobConfig, sections=True)
    help_command = "titan-tts train --help-config"
    given, alone = read_command_line(list(args), kinds, OLD_KEYS, help_command)
    if alone:
        raise InputError(f"{alone[0]!r} has no option --section.key before it")
    if sections is None:
        where = given.get("job.config_file") or ""
        sections = _read_file(where) if where else {}
    config = dataclass_from_dict(JobConfig, sections, where)
    for name, value in given.items():
        section, _, key = name.rpartition(".")
        is_path = kinds[name] == str | list[str]
        setattr(attrgetter(section)(config), key, _split_paths(value) if is_path else value)
    # Upstream imports a module that a config names, whoever wrote it.
    if config.job.custom_config_module or config.experimental.custom_args_module:
        raise InputError(
            "[job] custom_config_module is not supported: the config of this model family has all its sections; "
            "remove it"
        )
    return config


def _read_file(path: str) -> dict[str, Any]:
    try:
        sections = read_toml(path)
    except OSError as error:
        raise InputError(
            f"job.config_file: cannot read {path} ({error.strerror}); give a TOML file, for example "
            f"train_configs/debug.toml"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    if exported.is_exported(Path(path).parent):
        check_export_runs_nothing(sections, path)
    return sections


def without_none(value: Any) -> Any:
    """A nested dictionary without its None values, for which TOML has no word."""
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return value


def config_from_dict(content: dict[str, dict[str, Any]], where: str) -> JobConfig:
    """A config from its sections, as JSON or TOML keeps them; `where` names them in messages."""
    return dataclass_from_dict(JobConfig, without_none(content), where)


def load_config(args: list[str]) -> JobConfig:
    """The resolved config from `--job.config_file X.toml` and `--section.key value` arguments."""
    return resolve(parse_config(args))


def load_run_config(folder: Path, args: Sequence[str] = ()) -> JobConfig:
    """The config that a run has written to its folder, or an exported folder has of it, with
    `--section.key value` arguments. Raises InputError where there is none."""
    path = folder / "config.toml"
    if path.is_file():
        return load_config(["--job.config_file", str(path), *args])
    if not exported.is_exported(folder):
        exported.refuse_pickles(folder)
        is_none = "is not a run folder: it has no config.toml"
        found = is_none if folder.exists() else "does not exist"
        raise InputError(
            f"{folder} {found}; give outputs/NAME, or a folder that titan-tts export wrote"
        )
    sections = without_none(exported.placed_config(folder))
    return resolve(parse_config(args, sections, str(folder / exported.CONFIG)))


def resolve(
    config: JobConfig, vocab_size: int | None = None, steps: int | None = None
) -> JobConfig:
    """A copy of the config with all that follows from it filled in: what a run uses and writes.

    Args:
        vocab_size: ids of the run's tokenizer, once it is known.
        steps: number of steps, once `[data] epochs` or a benchmark has decided it.
    """
    config = copy.deepcopy(config)
    if not config.job.experiment:
        config.job.experiment = Path(config.job.config_file or "default").stem
    # The run's config.toml must name the same data, encoder and codec from any folder.
    path = config.data.path
    config.data.path = _absolute(path) if isinstance(path, str) else [_absolute(p) for p in path]
    config.validation.path = _heldout_path(config)
    config.validation.enable = config.validation.enable and bool(config.validation.path)
    if is_pretrained(config.encoder.model) and os.path.isdir(local_path(config.encoder.model)):
        config.encoder.model = local_path(config.encoder.model)
    config.sampling.codec = from_any_folder(config.sampling.codec)
    config.distill.teacher = shipped_path(config.distill.teacher)
    if config.checkpoint.initial_load_path:
        config.checkpoint.initial_load_path = shipped_path(config.checkpoint.initial_load_path)
    if config.lora.rank and config.checkpoint.initial_load_path:
        # What speaks with the run's adapter needs the weights that it is for.
        config.checkpoint.initial_load_path = local_path(config.checkpoint.initial_load_path)
    if config.benchmark.enable:  # no data, no checkpoints, no audit, no page at W&B
        config.data = dataclasses.replace(
            config.data, path="", weights=[], balance_by="", epochs=0, audit=False
        )
        config.checkpoint.enable = config.checkpoint.create_seed_checkpoint = False
        config.checkpoint.initial_load_path = None
        config.validation.enable, config.samples.freq = False, 0
        config.metrics.enable_wandb = False
    if vocab_size is not None:
        config.encoder.vocab_size = vocab_size
    if steps is not None:
        config.training.steps = steps
    return config


def _heldout_path(config: JobConfig) -> str | list[str]:
    """`[validation] path` as absolute paths; else the folder `heldout` next to a folder of shards."""
    path, data = config.validation.path, config.data.path
    if isinstance(path, list):
        return [_absolute(each) for each in path]
    if path or not isinstance(data, str) or not data or is_remote(data):
        return _absolute(path)
    beside = Path(data).parent / "heldout"
    found = Path(data).is_dir() and beside != Path(data) and beside.is_dir() and shards_in(beside)
    return str(beside) if found else ""


def _absolute(path: str) -> str:
    return path if not path or is_remote(path) else local_path(path)


def run_folder_path(config: JobConfig) -> Path:
    """The run folder, <dump_folder>/<experiment>."""
    return Path(os.path.expanduser(config.job.dump_folder)) / config.job.experiment


def upstream_view(config: JobConfig, folder: Path, dp_degree: int) -> JobConfig:
    """A copy of the config as upstream's trainer and the builders it calls read it: `dump_folder` is
    the run folder, and a local batch size of 0 is the one that follows (`batch_split`).

    While the trainer is built, tokenizer and data loader write `[encoder] vocab_size` and
    `[training] steps` to it, where upstream reads them.
    """
    view = copy.deepcopy(config)
    view.job.dump_folder = str(folder)
    training = view.training
    total, accumulation = batch_split(training, dp_degree)
    training.local_batch_size = total // (dp_degree * accumulation)
    return view
