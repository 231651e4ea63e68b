"""Reads a run's config: TOML, then the command line, each key checked by name and type."""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import typeguard
import tyro

from torchtitan.config import ConfigManager
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.storage import check_url
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, local_path
from torchtitan.models.dit_tts.text.hf_encoder import is_pretrained


def _hint(name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]}?" if close else "allowed are " + ", ".join(sorted(allowed))


def _of_type(value: Any, kind: Any) -> bool:
    """Every element counts, and true is no number."""
    try:
        typeguard.check_type(
            value, kind, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        return False
    elements = value if isinstance(value, list) else [value]
    return kind is bool or not any(isinstance(element, bool) for element in elements)


def _unboxed(words: str) -> str:
    """The sentence inside tyro's box, without the help that follows its rule."""
    lines = [line.strip("│ ") for line in words.splitlines() if line.startswith("│")]
    rule = next((i for i, line in enumerate(lines) if line.startswith("─")), len(lines))
    return " ".join(lines[:rule]).rstrip(".").replace(". ", "; ") or " ".join(words.split())


def _split_paths(text: str) -> str | list[str]:
    """At the commas outside braces; a path of that very name is one."""
    if os.path.exists(text):
        return text
    paths = re.split(r",(?![^{}]*\})", text)
    return paths if len(paths) > 1 else text


class TTSConfigManager(ConfigManager):
    """Upstream's config manager, whose errors name the file, the key and what is allowed."""

    def __init__(self) -> None:
        super().__init__(config_cls=JobConfig)
        self._file = ""
        self._section = ""

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

    def parse_args(self, args: list[str]) -> JobConfig:
        words = io.StringIO()
        try:
            with contextlib.redirect_stderr(words):
                return super().parse_args(args)
        except SystemExit as stop:  # tyro's, at a value that does not fit its flag
            if not stop.code:
                raise
            raise InputError(f"command line: {_unboxed(words.getvalue())}; see --help") from stop

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        self._check_command_line(args)
        for position, arg in enumerate(args):
            key, _, value = arg.partition("=")
            if key.replace("-", "_") == "__job.config_file":
                self._file = value or (args[position + 1] if position + 1 < len(args) else "")
        if not self._file:
            return None
        try:
            with open(self._file, "rb") as toml:
                return tomllib.load(toml)
        except OSError as error:
            raise InputError(
                f"job.config_file: cannot read {self._file} ({error.strerror}); give a TOML file, "
                f"for example train_configs/debug.toml"
            ) from error
        except ValueError as error:  # TOML's grammar, or bytes that are no utf-8
            raise InputError(f"{self._file} is not valid TOML: {error}; mend that line") from error

    def _check_command_line(self, args: list[str]) -> None:
        """Unknown --section.key flags, in one sentence."""
        sections = {f.name: f.type for f in dataclasses.fields(self.config_cls)}
        for arg in args:
            if not arg.startswith("--") or arg in ("--help", "--"):
                continue
            flag = arg.split("=")[0]
            cls: Any = self.config_cls
            parts = flag[2:].replace("-", "_").split(".")
            for part in parts:
                names = (
                    [f.name for f in dataclasses.fields(cls)]
                    if dataclasses.is_dataclass(cls)
                    else []
                )
                plain = part.removeprefix("no_") if part not in names else part
                if plain not in names:
                    known = sections if cls is self.config_cls else names
                    raise InputError(f"unknown option {flag}: {_hint(part, list(known))}")
                cls = next(f.type for f in dataclasses.fields(cls) if f.name == plain)

    def _dict_to_dataclass(self, cls, data: dict[str, Any]) -> Any:
        known = {f.name: f for f in dataclasses.fields(cls)}
        values = {}
        for name, value in data.items():
            key = f"[{self._section}] {name}" if self._section else f"section [{name}]"
            if name not in known:
                raise InputError(f"{self._file}: unknown {key}: {_hint(name, list(known))}")
            kind = known[name].type
            if dataclasses.is_dataclass(kind):
                if not isinstance(value, dict):
                    raise InputError(f"{self._file}: {key} = {value!r} must be a section, [{name}]")
                outer, self._section = self._section, ".".join(filter(None, [self._section, name]))
                values[name] = self._dict_to_dataclass(kind, value)
                self._section = outer
                continue
            if not _of_type(value, kind):
                allowed = kind.__name__ if kind in (bool, int, float, str) else kind
                raise InputError(
                    f"{self._file}: {key} = {value!r} has the wrong type; allowed is "
                    f"{str(allowed).removeprefix('typing.')}"
                )
            values[name] = value
        return cls(**values)

    def _validate_config(self) -> None:
        """Upstream looks for a language model's tokenizer here; this family has none."""


def config_from_dict(content: dict[str, dict[str, Any]], where: str) -> JobConfig:
    """A resolved config as JSON keeps it, section by section; `where` names it in messages.

    Raises:
        InputError: an unknown key, a value of the wrong type.
    """

    def without_none(value: Any) -> Any:  # as in TOML, a missing key stands for None
        if not isinstance(value, dict):
            return value
        return {key: without_none(each) for key, each in value.items() if each is not None}

    manager = TTSConfigManager()
    manager._file = where
    return manager._dict_to_dataclass(JobConfig, without_none(content))


def load_config(args: list[str]) -> JobConfig:
    """Config of a run from `--job.config_file X.toml` and `--section.key value` arguments.

    Raises:
        InputError: an unreadable file, an unknown key, a value of the wrong type.
    """
    config = TTSConfigManager().parse_args(args)
    if not config.job.experiment:
        stem = Path(config.job.config_file).stem if config.job.config_file else "default"
        config.job.experiment = stem
    # The run's config.toml must name the same data, encoder and codec from any folder.
    path = config.data.path
    if isinstance(path, str):
        config.data.path = _from_any_folder(path)
    else:
        config.data.path = [_from_any_folder(entry) for entry in path]
    encoder = config.encoder
    if is_pretrained(encoder.model) and os.path.isdir(os.path.expanduser(encoder.model)):
        encoder.model = local_path(encoder.model)
    sampling = config.sampling
    if os.path.exists(os.path.expanduser(sampling.codec)):
        sampling.codec = local_path(sampling.codec)
    return config


def _from_any_folder(path: str) -> str:
    check_url(path)
    return path if not path or is_remote(path) else local_path(path)


def run_folder_path(config: JobConfig) -> Path:
    """The run's folder, <dump_folder>/<experiment>."""
    return Path(os.path.expanduser(config.job.dump_folder)) / config.job.experiment


def upstream_view(config: JobConfig, folder: Path, dp_degree: int) -> JobConfig:
    """The config as upstream's trainer should see it: it writes everything below dump_folder, and
    a local batch size of 0 is the global batch divided by the data-parallel ranks."""
    training = config.training
    local = training.local_batch_size or training.global_batch_size // dp_degree
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=str(folder)),
        training=dataclasses.replace(training, local_batch_size=local),
    )
