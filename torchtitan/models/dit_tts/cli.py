"""The command `titan-tts`: its sub-commands are modules with `add_arguments` and `run`."""

import argparse
import importlib

from torchtitan.models.dit_tts.main import report_input_errors

_COMMANDS = {
    "prepare": ("prepare.command", "audio and text to archives of latents"),
    "generate": ("inference.generate_command", "text to speech with a trained run"),
    "evaluate": ("inference.evaluate_command", "word error rate of a run's speech, with wavs"),
}


@report_input_errors
def main(args: list[str]) -> int:
    """Runs one sub-command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="titan-tts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = next((arg for arg in args if not arg.startswith("-")), None)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            # Only the chosen one is imported: torch and audio libraries take seconds.
            loaded = importlib.import_module(f"torchtitan.models.dit_tts.{module}")
            loaded.add_arguments(command)
            command.set_defaults(run_command=loaded.run)
    options = parser.parse_args(args)
    return options.run_command(options)
