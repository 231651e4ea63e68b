"""The command `titan-tts`: how it finds, parses and runs a sub-command."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import tyro

from torchtitan.models.dit_tts import cli
from torchtitan.models.dit_tts.errors import InputError


@dataclass
class Options:
    source: tyro.conf.Positional[str]
    """Where the recordings are."""

    workers: int = 2
    """Number of processes."""

    overwrite: bool = False
    """Replace the output."""


@dataclass
class ConfigOptions:
    config: tyro.conf.Positional[str] = ""
    nodes: int = 1
    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


@pytest.fixture
def ran(monkeypatch):
    """The options that a command was run with; "data doctor" ends with an InputError."""
    found = []

    def run(options):
        found.append(options)
        return 3

    def refuse(options):
        raise InputError("[data] path = '' is empty")

    modules = {
        "prepare.command": SimpleNamespace(Options=Options, run=run),
        "plan.command": SimpleNamespace(Options=ConfigOptions, run=run),
        "doctor.doctor_command": SimpleNamespace(Options=Options, run=refuse),
    }
    monkeypatch.setattr(cli, "_load", modules.__getitem__)
    return found


def test_options_reach_the_command_and_its_status_comes_back(ran):
    assert cli.main(["prepare", "corpus", "--workers", "5", "--overwrite"]) == 3
    assert ran == [Options("corpus", 5, True)]


def test_a_command_with_a_config_gets_its_keys(ran):
    keys = ["--data.path=d", "--data.bucket_frames", "8", "16", "--ema.no-enable"]
    assert cli.main(["plan", "x.toml", *keys, "--nodes", "4"]) == 3
    assert cli.main(["plan", *keys]) == 3
    assert ran == [ConfigOptions("x.toml", 4, keys), ConfigOptions("", 1, keys)]


@pytest.mark.parametrize(
    "args",
    [
        ["prepar", "corpus"],
        ["prepare"],
        ["prepare", "corpus", "--worker-count", "5"],
        ["prepare", "corpus", "--workers", "five"],
        ["plan", "x.toml", "--node", "4"],
        ["data"],
        ["data", "heal"],
    ],
)
def test_a_command_line_that_does_not_fit_ends_with_status_2(ran, args, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2 and ran == []
    assert "titan-tts" in capsys.readouterr().err


def test_an_input_error_is_printed_without_a_traceback(ran, capsys):
    assert cli.main(["data", "doctor", "d"]) == 2
    assert capsys.readouterr().err == "error: [data] path = '' is empty\n"
