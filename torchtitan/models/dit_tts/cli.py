"""The command `titan-tts`: its sub-commands are modules with `add_arguments` and `run`."""

import argparse
import importlib
from typing import Any

from torchtitan.models.dit_tts.errors import report_input_errors

# Name -> (module, summary), or (commands of its own, summary).
_COMMANDS = {
    "prepare": ("prepare.command", "audio and text to archives of latents"),
    "data": (
        {
            "inspect": ("doctor.inspect_command", "what a dataset holds, from its indexes"),
            "doctor": (
                "doctor.doctor_command",
                "reads a whole dataset, says what is wrong with it and suggests batches",
            ),
        },
        "what is in a dataset of archives, and what is wrong with it",
    ),
    "export-codec": ("codec.export_command", "a DAC-VAE's weights to a safetensors file"),
    "plan": ("plan.command", "time, memory and MFU of a run before it starts, for a named GPU"),
    "generate": ("inference.generate_command", "text to speech with a trained run"),
    "evaluate": ("inference.evaluate_command", "word error rate of a run's speech, with wavs"),
}


@report_input_errors
def main(args: list[str]) -> int:
    """Runs one sub-command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="titan-tts", description=__doc__)
    _add_commands(parser, _COMMANDS, [arg for arg in args if not arg.startswith("-")])
    options, rest = parser.parse_known_args(args)
    if rest and not hasattr(options, "config_args"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.config_args = rest  # --section.key value, of a command that takes them
    return options.run_command(options)


def _add_commands(
    parser: argparse.ArgumentParser, commands: dict[str, tuple[Any, str]], words: list[str]
) -> None:
    """Adds sub-commands; ``words`` are the command line's words from here on, without options."""
    choices = parser.add_subparsers(dest="command", required=True)
    for name, (target, summary) in commands.items():
        command = choices.add_parser(name, help=summary, description=summary)
        chosen = words[:1] == [name]
        if isinstance(target, dict):
            _add_commands(command, target, words[1:] if chosen else [])
        elif chosen:
            # Only the chosen one is imported: torch and audio libraries take seconds.
            loaded = importlib.import_module(f"torchtitan.models.dit_tts.{target}")
            loaded.add_arguments(command)
            command.set_defaults(run_command=loaded.run)
