"""The command `titan-tts`: how it finds, parses and runs a sub-command."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from tests.helpers.tiny_runs import TINY
from titan_tts import cli
from titan_tts.launch import torchrun
from titan_tts.plan import report
from tools.harness import forked
from torchtitan.models.dit_tts import main
from torchtitan.models.dit_tts.config.shipped import find_config, shipped_configs
from torchtitan.models.dit_tts.errors import InputError, require_modules

ROOT = Path(__file__).resolve().parents[2]
DEBUG = str(ROOT / "train_configs/debug.toml")


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
        "prepare.prepare_command": SimpleNamespace(Options=Options, run=run),
        "plan.plan_command": SimpleNamespace(Options=ConfigOptions, run=run),
        "doctor.doctor_command": SimpleNamespace(Options=Options, run=refuse),
    }
    load = cli._load
    monkeypatch.setattr(cli, "_load", lambda target: modules.get(target) or load(target))
    return found


def test_a_command_with_a_config_gets_its_keys(ran):
    assert cli.main(["prepare", "corpus", "--workers", "5", "--overwrite"]) == 3
    assert ran.pop() == Options("corpus", 5, True)
    keys = ["--data.path=d", "--data.bucket_frames", "8", "16", "--ema.no-enable"]
    assert cli.main(["plan", "x.toml", *keys, "--nodes", "4"]) == 3
    assert cli.main(["plan", *keys]) == 3
    assert ran == [ConfigOptions("x.toml", 4, keys), ConfigOptions("", 1, keys)]
    # Old keys without a section are refused there, with what replaces them.
    assert cli.main(["plan", "x.toml", "--batch-size", "4"]) == 3
    assert ran[-1] == ConfigOptions("x.toml", 1, ["--batch-size", "4"])


SENTENCES = """
prepare a --workers five | --workers = 'five', but it must be a whole number
prepare a --workers | --workers has no value, but it must be a whole number
prepare a --overwrite=1 | --overwrite is a switch and takes no value, but '1' is given
prepare a b | titan-tts prepare: 'b' is an unexpected argument; titan-tts prepare --help
prepare | titan-tts prepare needs SOURCE; see titan-tts prepare --help
generate a --dry-run=1 | unknown option --dry-run: titan-tts generate --help
generate a --text-lst b | unknown option --text-lst: did you mean --text-list?
plan x.toml --node 4 | unknown option --node: did you mean --nodes?
generate a --step bast | --step = 'bast', but it must be a whole number or 'best'
checkpoint verfy a | ACTION = 'verfy', but it must be 'verify'
train debug --nodes 2 --rendezvous host0 | --rendezvous 'host0' with --nodes 2: give HOST:PORT
data doctor d | [data] path = '' is empty
prepar corpus | there is no command 'prepar': did you mean prepare?
xyz | there is no command 'xyz': there are train, finetune, configs,
"""


@pytest.mark.parametrize("row", SENTENCES.strip().splitlines())
def test_a_command_line_that_does_not_fit_is_one_sentence(ran, row, capsys):
    arguments, sentence = row.split(" | ")
    assert cli.main(arguments.split()) == 2 and ran == []
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}") and said.count("\n") == 1


@pytest.mark.parametrize(
    "given, spins",
    [
        ({}, "3000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, None),
    ],
)
def test_threads_wait_briefly_unless_told(ran, monkeypatch, given, spins):
    monkeypatch.setattr(os, "environ", given)
    assert cli.main(["prepare", "recordings"]) == 3 and ran
    assert given.get("GOMP_SPINCOUNT") == spins


def test_a_missing_package_ends_with_the_extra_that_has_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for needs in (importlib.import_module, require_modules):
        command = SimpleNamespace(Options=Options, run=lambda _, needs=needs: needs("soundfile"))
        monkeypatch.setattr(cli, "_load", lambda target, command=command: command)
        assert cli.main(["prepare", "corpus"]) == 2
        assert "pip install 'titan-tts[speech]'" in capsys.readouterr().err


WITHOUT_TORCH = """
import json, sys
import titan_tts

status = []
for args in {command_lines}:
    sys.argv = ["titan-tts", *args]
    try:
        titan_tts.main()
    except SystemExit as stop:
        status.append(stop.code)
print(json.dumps({{"status": status, "loaded": sorted({{"torch", "numpy", "transformers"}} & set(sys.modules))}}))
"""


def all_commands(commands, names=()):
    for name, (target, _) in commands.items():
        if isinstance(target, dict):
            yield from all_commands(target, (*names, name))
        else:
            yield (*names, name)


@pytest.mark.long
def test_help_and_mistakes_load_no_torch():
    helps = [[*names, "--help"] for names in all_commands(cli._COMMANDS)]
    helps += [["--help"], ["--version"], ["configs"], ["train", "--help-config"]]
    mistakes = [["trian"], ["train", "--nproc", "two"], ["train", "debug", "--training.step=1"]]
    code, env = WITHOUT_TORCH.format(command_lines=helps + mistakes), os.environ | {"COLUMNS": "80"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    *lines, last = done.stdout.splitlines()
    assert len(lines) > 500 and max(map(len, lines)) == 80
    status = [0] * len(helps) + [2] * len(mistakes)
    assert json.loads(last) == {"status": status, "loaded": []}


def test_completion_knows_all_commands_and_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--tyro-print-completion", "bash"])
    script = capsys.readouterr().out
    assert all(word in script for word in ("finetune", "doctor", "--dtype", "bfloat16"))


# Optional or only for other configs than this one; torch itself imports Dynamo, DTensor and sympy.
UNUSED = """boto3 datasets matplotlib pandas pocketsphinx pyarrow scipy soundfile tensorboard torchao transformers wandb
torch._inductor.compile_fx torch.utils.tensorboard torchtitan.models.attention""".split()
MAX_MODULES = 2_700

START = """
import json, sys
from torchtitan.models.dit_tts import trainer
from torchtitan.models.dit_tts.main import train

def before_the_first_step(self):
    print(json.dumps(list(sys.modules)))
    raise SystemExit(0)

trainer.DiTTTSTrainer._continue_from_step = before_the_first_step
train(sys.argv[1:])
"""


@pytest.mark.long
def test_a_start_imports_what_it_uses(tiny_data, tmp_path):
    """Each hundred modules take 0.1 seconds of every rank's start."""
    arguments = ["--job.config_file", DEBUG, f"--data.path={tiny_data}", *TINY]
    command = [sys.executable, "-c", START, *arguments, f"--job.dump_folder={tmp_path}"]
    done = subprocess.run(
        command, cwd=ROOT, env=forked.environment(), capture_output=True, text=True
    )
    first, *_, last = done.stdout.splitlines()
    assert first == f"titan-tts train: starting; run folder: {tmp_path}/debug"
    loaded = json.loads(last)
    assert "torch" in loaded and [name for name in UNUSED if name in loaded] == []
    assert len(loaded) <= MAX_MODULES


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("WORLD_SIZE=0", "WORLD_SIZE is 0, but a launcher sets it to a whole number from 1"),
        ("LOCAL_WORLD_SIZE=abc", "LOCAL_WORLD_SIZE is abc"),  # which env.json's writer reads
        ("MASTER_ADDR=", "MASTER_ADDR is not set"),
        ("RANK=1", "RANK is 1, but a launcher sets it to less than WORLD_SIZE"),
    ],
)
def test_what_a_launcher_leaves_out_is_named(tmp_path, monkeypatch, capsys, given, said):
    launcher = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
    for each in (*launcher.split(), given):
        monkeypatch.setenv(*each.split("="))
    assert main.train(["--job.config_file", DEBUG, f"--job.dump_folder={tmp_path}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and not list(tmp_path.iterdir())


# `titan-tts train` and `titan-tts configs`


def test_configs_are_found_listed_and_copied_but_replace_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert find_config("800M") == ROOT / "train_configs/dit_tts_800m.toml"
    Path("debug").write_text("")
    assert find_config("debug") == Path("debug")
    with pytest.raises(InputError, match="one of: .*800m"):
        find_config("900m")
    assert cli.main(["configs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(listed) == set(shipped_configs())
    assert cli.main(["configs", "--copy", "3b"]) == 0
    copied = Path("dit_tts_3b.toml")
    assert capsys.readouterr().out == f"{copied}: train it with titan-tts train {copied}\n"
    assert copied.read_bytes() == (ROOT / "train_configs/dit_tts_3b.toml").read_bytes()
    copied.write_text("mine")
    assert cli.main(["configs", "--copy", "3b"]) == 2 and copied.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("debug --ema.no-enable", f"train --job.config_file {DEBUG} --ema.no-enable"),
        ("--job.config_file x", "train --job.config_file x"),
        ("debug --dry-run --nproc 4 --nodes 2", f"dry run of 8 --job.config_file {DEBUG}"),
        (
            "debug --nproc 2 --data.path d",
            f"torchrun --standalone --nproc_per_node 2 -m titan_tts train --job.config_file {DEBUG} --data.path d",
        ),
        (
            "x.toml --nodes 3 --rendezvous host0:29500 --nproc 2",
            "torchrun --nnodes 3 --rdzv_backend c10d --rdzv_endpoint host0:29500 --nproc_per_node 2 "
            "-m titan_tts train --job.config_file {folder}/x.toml",
        ),
    ],
)
def test_train_passes_its_config_on(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").touch()
    seen = []

    def note(what):
        return lambda args, gpus="": seen.append(" ".join([f"{what}{gpus}", *args])) or 0

    monkeypatch.setattr(report, "print_dry_run", note("dry run of "))
    monkeypatch.setattr(main, "train", note("train"))
    monkeypatch.setattr(torchrun, "launch", note("torchrun"))
    assert cli.main(["train", *arguments.split()]) == 0
    assert seen == [expected.format(folder=tmp_path)]


@pytest.mark.long
def test_help_on_the_config_shows_what_is_used_ours_first(capsys):
    """A reader that leaves early ends the output quietly."""

    command = f"{sys.executable} -m titan_tts train --help-config | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == "" and done.stdout.startswith("usage: ")

    with pytest.raises(SystemExit):
        cli.main(["train", "--help-config"])
    used = capsys.readouterr().out
    assert used.index("job options") < used.index("data options") < used.index("training options")
    assert "--training.global-batch-size" in used and "--quantize.linear.float8." in used
    assert "--parallelism.expert" not in used
