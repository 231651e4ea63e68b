"""The command `titan-tts` and its sub-commands.

A sub-command is a module with a dataclass `Options`, whose fields' docstrings are the help, and
`run(options) -> int`, which returns the exit status. The module must import without torch, so that
help and a mistake in the options take no seconds; `run` imports what it needs. Where `Options` has a
field `config_args`, that field gets the command line's keys of a config (--section.key value).
"""

import dataclasses
import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Collection
from contextlib import redirect_stderr
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Union, get_args, get_origin

import tyro

from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS
from torchtitan.models.dit_tts.config.options import (
    option_kinds,
    option_name,
    read_command_line,
    read_options,
    read_value,
)
from torchtitan.models.dit_tts.errors import InputError, report_input_errors

_DESCRIPTION = (
    "Train, prepare data, plan, generate and evaluate DiT text-to-speech. "
    "titan-tts --version prints the versions."
)

# Name -> (module, summary), or (commands of its own, summary).
_COMMANDS: dict[str, tuple[Any, str]] = {
    "train": ("launch.train_command", "Train a model."),
    "finetune": (
        "finetune.finetune_command",
        "Train a model on a voice, and compare it with what it was.",
    ),
    "configs": ("configs_command", "List the configs that come with the package, or copy one."),
    "prepare": ("prepare.prepare_command", "Encode audio and text into shards of latents."),
    "collect": ("collect.collect_command", "Cut hours of recordings into segments, for prepare."),
    "data": (
        {
            "inspect": ("doctor.inspect_command", "Show what a dataset holds, from its indexes."),
            "doctor": ("doctor.doctor_command", "List what is wrong with a dataset."),
            "export": ("share.export_command", "Write shards as Parquet files or as audio."),
        },
        "Inspect, check and export a dataset of shards.",
    ),
    "annotate": ("annotate.annotate_command", "Open a page to correct the texts of segments."),
    "checkpoint": ("checkpoint_command", "Compare a run's checkpoints with their manifests."),
    "export": ("export.export_command", "Write a trained model to a folder of its own."),
    "convert": (
        "convert.convert_command",
        "Read models of Echo-TTS and Irodori-TTS, and write them.",
    ),
    "plan": ("plan.plan_command", "Predict time, memory and MFU of a run on a named GPU."),
    "ablate": ("grids.ablate_command", "Run or continue a grid of benchmarks."),
    "analyze": ("grids.analyze_command", "Compare the speed and memory of runs, as one HTML page."),
    "generate": ("speak.generate_command", "Synthesize speech from text with a trained run."),
    "serve": ("serving.serve_command", "Serve a model over HTTP, as OpenAI's speech API does."),
    "evaluate": ("evaluate.evaluate_command", "Measure and compare the speech of runs."),
}

_STYLE = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.PositionalMetavarFromFieldName,
)


@report_input_errors
def main(args: list[str]) -> int:
    """Runs one sub-command. Returns the exit status."""
    if args[:1] == ["--version"]:
        print(_versions())
        return 0
    completion = any(arg.startswith("--tyro-") for arg in args)
    command = _chosen(args)
    if command is None and not any(arg.startswith("-") for arg in args):
        args = [*args, "--help"]  # of all commands or of a group's
    config_args: list[str] = []
    if command is not None and "config_args" in command.Options.__dataclass_fields__:
        args, config_args = _split_config_args(args, command.Options.__dataclass_fields__)
    refusal = io.StringIO()
    try:
        with redirect_stderr(refusal):
            options: Any = read_options(
                _union(_COMMANDS, None if completion else args),
                tyro.constructors.ConstructorRegistry(),
                prog="titan-tts",
                description=_DESCRIPTION,
                args=args,
                config=_STYLE,
            )
    except SystemExit as stop:
        # tyro decides what is allowed; for most mistakes we have one sentence instead of its box.
        if stop.code and command is not None:
            _check_options(args, command.Options)
        sys.stderr.write(refusal.getvalue())
        raise
    if config_args:
        options = dataclasses.replace(options, config_args=config_args)
    # Read by libgomp when torch is imported. By default its threads spin for so long that a step takes ten times as long
    # where another program uses one of the cores; sleeping at once costs a third.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    return command.run(options)


def _split_config_args(args: list[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Splits off --section.key with the values up to the next option, and old keys without a section, whose
    refusal names what replaces them."""
    own: list[str] = []
    config: list[str] = []
    target = own
    for arg in args:
        if arg.startswith("--"):
            name = option_name(arg)
            of_config = "." in name or (name in OLD_KEYS and name not in options)
            target = config if of_config else own
        target.append(arg)
    return own, config


def _check_options(args: list[str], cls: Any) -> None:
    """Raises InputError for an unknown option, a wrong value, or too many or too few arguments."""
    commands = 1 if isinstance(_COMMANDS[args[0]][0], str) else 2
    command = " ".join(["titan-tts", *args[:commands]])
    fields = dataclasses.fields(cls)
    positional = [f for f in fields if tyro.conf.Positional in getattr(f.type, "__metadata__", ())]
    kinds = option_kinds(cls)
    several = [f for f in positional if get_origin(get_args(f.type)[0]) in (list, tuple)]
    for name in (*(field.name for field in positional), "config_args"):
        kinds.pop(name, None)
    found, alone = read_command_line(args[commands:], kinds, {}, f"{command} --help")
    for each, value in zip(positional, alone):
        found[each.name] = read_value(each.name.upper(), [value], each.type)
    missing = [
        f.name.upper() if f in positional else f"--{f.name.replace('_', '-')}"
        for f in fields
        if f.name not in found and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{command} needs {' and '.join(missing)}; see {command} --help")
    if len(alone) > len(positional) and not several:
        raise InputError(
            f"{command}: {alone[len(positional)]!r} is an unexpected argument; {command} --help lists the arguments"
        )


def _load(target: str) -> Any:
    return importlib.import_module(f"titan_tts.{target}")


def _chosen(args: list[str]) -> Any:
    """The module of the command that the first arguments name; None if they name none or a group."""
    target: Any = _COMMANDS
    for arg in args:
        if arg.startswith("-"):
            return None
        if arg not in target:
            close = difflib.get_close_matches(arg, target, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(target)}"
            raise InputError(f"there is no command {arg!r}: {hint}")
        target = target[arg][0]
        if isinstance(target, str):
            return _load(target)
    return None


def _not_loaded() -> None:
    """Stands for the commands that were not chosen, whose modules are not imported."""


def _union(commands: dict[str, tuple[Any, str]], args: list[str] | None) -> Any:
    """The sub-commands as tyro reads them; those that `args` name are imported, None: all."""
    alternatives = []
    for name, (target, summary) in commands.items():
        options: Any = _not_loaded
        if isinstance(target, dict):
            options = _union(
                target, None if args is None else args[1:] if args[:1] == [name] else []
            )
        elif args is None or args[:1] == [name]:
            options = _load(target).Options
            # A dataclass without a docstring gets its signature as one.
            if args and not (options.__doc__ or "").startswith(f"{options.__name__}("):
                summary = inspect.cleandoc(options.__doc__ or summary)
        command = tyro.conf.subcommand(name, constructor=options, description=summary)
        alternatives.append(Annotated[Any, command])
    return Union[tuple(alternatives)]  # noqa: UP007


def _versions() -> str:
    found = []
    for package in ("titan-tts", "torchtitan", "torch"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed)")
    return ", ".join(found)
