"""The config of a run: read from TOML and command line, resolved, and as upstream's trainer sees it."""

import copy
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typeguard
import tyro

from torchtitan.config.manager import ConfigManager
from torchtitan.models.dit_tts.bounded import read_toml
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS, changes_nothing
from torchtitan.models.dit_tts.config.options import (
    check_command_line,
    describe,
    option_kinds,
    option_name,
    plain,
)
from torchtitan.models.dit_tts.config.trust import check_export_runs_nothing
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, local_path, shards_in


def _of_type(value: Any, kind: Any) -> bool:
    """Checks every element; a boolean is no number."""
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


class TTSConfigManager(ConfigManager):
    """Upstream's config manager with strict types in the TOML, lists of paths and of numbers, and
    `--section.key true` in addition to the flag `--section.key`."""

    def __init__(self, content: dict[str, Any] | None = None, where: str = "") -> None:
        """content: of a config, instead of the file that is named; where: what messages call it."""
        super().__init__(config_cls=JobConfig)
        self._content, self._file = content, where

    @staticmethod
    def register_tyro_rules(registry: tyro.constructors.ConstructorRegistry) -> None:
        ConfigManager.register_tyro_rules(registry)

        @registry.primitive_rule
        def paths_rule(type_info: tyro.constructors.PrimitiveTypeInfo):
            """Paths with commas between them, as upstream's lists of strings."""
            if type_info.type != str | list[str]:
                return None
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="A,B,C,...",
                instance_from_str=lambda args: _split_paths(args[0]),
                is_instance=lambda value: isinstance(value, (str, list)),
                str_from_instance=lambda value: [
                    value if isinstance(value, str) else ",".join(value)
                ],
            )

        @registry.primitive_rule
        def numbers_rule(type_info: tyro.constructors.PrimitiveTypeInfo):
            """Numbers with commas or blanks between them."""
            if type_info.type not in (list[int], list[float]):
                return None
            kind = int if type_info.type == list[int] else float
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs="*",
                metavar="A,B,C,...",
                instance_from_str=lambda args: [
                    kind(n) for arg in args for n in arg.split(",") if n
                ],
                is_instance=lambda value: isinstance(value, list),
                str_from_instance=lambda value: [str(number) for number in value],
            )

    def parse_args(self, args: list[str] = sys.argv[1:]) -> JobConfig:
        kinds = option_kinds(JobConfig, sections=True)
        _, alone = check_command_line(args, kinds, OLD_KEYS, "titan-tts train --help-config")
        for arg in alone:
            raise InputError(f"{arg!r} has no option --section.key before it")
        return super().parse_args(_boolean_flags(args))  # type: ignore[return-value]

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        if self._content is not None:
            return self._content
        for position, arg in enumerate(args):
            key, _, value = arg.partition("=")
            if key.replace("-", "_") == "__job.config_file":
                self._file = value or (args[position + 1] if position + 1 < len(args) else "")
        if not self._file:
            return None
        try:
            sections = read_toml(self._file)
        except OSError as error:
            raise InputError(
                f"job.config_file: cannot read {self._file} ({error.strerror}); give a TOML file, "
                f"for example train_configs/debug.toml"
            ) from error
        except ValueError as error:
            raise InputError(f"{self._file} is not valid TOML: {error}") from error
        if exported.is_exported(Path(self._file).parent):
            check_export_runs_nothing(sections, self._file)
        return sections

    def _maybe_add_custom_config(
        self, args: list[str], toml_values: dict[str, Any] | None
    ) -> type[JobConfig]:
        """Upstream imports the module that a config names, whoever wrote it; this family has no use for it."""
        return JobConfig

    def _dict_to_dataclass(self, cls, data: dict[str, Any]) -> Any:
        return dataclass_from_dict(cls, data, self._file)

    def _validate_config(self) -> None:
        """Upstream looks for a language model's tokenizer here; this family has none."""
        job, experimental = self.config.job, self.config.experimental
        if job.custom_config_module or experimental.custom_args_module:
            raise InputError(
                "[job] custom_config_module is not supported: the config of this model "
                "family has all its sections; remove it"
            )


def _boolean_flags(args: list[str]) -> list[str]:
    """`--a.b true`, `--a.b=true` and the like as `--a.b` or `--a.no-b`, which is what tyro takes."""
    flags, rest, kinds = [], list(args), option_kinds(JobConfig, sections=True)
    while rest:
        arg = rest.pop(0)
        flag, given, value = arg.partition("=")
        if kinds.get(option_name(flag)) is bool:
            if not given and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            if value.lower() == "false":
                section, _, key = flag.rpartition(".")
                arg = f"{section}.no-{key}"
            elif value.lower() == "true":
                arg = flag
        flags.append(arg)
    return flags


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
    return resolve(TTSConfigManager().parse_args(args))


def load_run_config(folder: Path, args: Sequence[str] = ()) -> JobConfig:
    """The config that a run has written to its folder, or an exported folder has of it, with
    `--section.key value` arguments. Raises InputError where there is none."""
    path = folder / "config.toml"
    if path.is_file():
        return load_config(["--job.config_file", str(path), *args])
    if not exported.is_exported(folder):
        exported.refuse_pickles(folder)
        raise InputError(
            f"{folder} is not a run folder: it has no config.toml; give outputs/NAME, or a folder that "
            f"titan-tts export wrote"
        )
    sections = without_none(exported.placed_config(folder))
    return resolve(TTSConfigManager(sections, str(folder / exported.CONFIG)).parse_args(list(args)))


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
    if os.path.exists(os.path.expanduser(config.sampling.codec)):
        config.sampling.codec = local_path(config.sampling.codec)
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
