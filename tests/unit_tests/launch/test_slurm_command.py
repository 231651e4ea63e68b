"""`titan-tts launch`: the script it makes, and what it refuses; and the script for sbatch beside it."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from titan_tts import cli
from titan_tts.launch import slurm_command, slurm_queue
from torchtitan.models.dit_tts.config.shipped import find_config

ROOT = Path(__file__).resolve().parents[3]
DEBUG = ["launch", "debug", "--gpus-per-node", "2"]


@pytest.fixture
def launch(capsys):
    """The script for these arguments."""

    def run(*arguments: str) -> str:
        assert cli.main([*DEBUG, *arguments]) == 0
        return capsys.readouterr().out

    return run


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --(.*)$", script, re.M)


def test_options_become_directives_and_settings(launch):
    options = (
        "--nodes 1-2 --time 2-00:00:00 --signal-seconds 300 --max-requeues 7 --sbatch partition=gpu "
        "--sbatch=--mail-type=END --port 29500"
    )
    setup = "source venv/bin/activate"
    script = launch(*options.split(), "--setup", setup, "--optimizer.lr", "1e-3")
    assert directives(script) == [
        *("job-name=debug", "nodes=1-2", "ntasks-per-node=1", "time=2-00:00:00", "gpus-per-node=2"),
        *("exclusive", "mem=0", "signal=B:USR1@300", "requeue", "open-mode=append"),
        *("partition=gpu", "mail-type=END"),
    ]
    lines = script.splitlines()
    for line in (
        f"config={find_config('debug')}",
        "config_arguments=(--optimizer.lr 1e-3)",
        f"folder={Path('outputs/debug').absolute()}",
        "max_requeues=7",
        "port=29500",
    ):
        assert line in lines, line
    assert lines.index(f"{setup} || exit 1") < lines.index("set -uo pipefail")
    script = launch("--cpus-per-node", "16", "--no-gpu-request", "--max-requeues", "0")
    found = directives(script)
    assert "cpus-per-task=16" in found and "no-requeue" in found
    assert not {"exclusive", "mem=0", "requeue", "gpus-per-node=2"} & set(found)
    assert f"python=({shlex.quote(sys.executable)})" in script
    assert "port=$((15000 + SLURM_JOB_ID % 15000))" in script
    assert "max_requeues=100" in launch().splitlines()
    words = ["--setup", "module load x", "--setup", "module load y", "--python", "srun -v 'a b'"]
    assert "module load x || exit 1\nmodule load y || exit 1\n" in launch(*words)
    assert "python=(srun -v 'a b')" in launch(*words).splitlines()


def test_the_script_for_sbatch_has_the_directives_of_launch(launch):
    """It gets the rest from `titan-tts launch` when it starts."""
    script = (ROOT / "scripts/train_tts.slurm").read_text()
    launched = [re.sub("gpus-per-node=2", "gpus-per-node=8", each) for each in directives(launch())]
    assert directives(script) == ["job-name=titan-tts", *launched[1:]]
    assert "-m titan_tts launch" in script


HOSTILE = "a 'b' \"c\" $HOME $(touch x) `d` \\ * #\n--e;f &"


def test_hostile_values_are_quoted(launch, tmp_path, monkeypatch):
    folder = tmp_path / "$(touch x) 'y"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = Path("a b.toml")
    config.write_bytes(find_config("debug").read_bytes())
    monkeypatch.setattr(slurm_command.sys, "executable", "/a b/python")
    arguments = ["--job.description", HOSTILE, f"--job.dump_folder={HOSTILE}"]
    command = ["launch", str(config), "--gpus-per-node", "1", "--out", "job.sh", *arguments]
    assert cli.main(command) == 0
    settings = Path("job.sh").read_text().partition("\nsay()")[0]
    show = 'printf "%s\\0" "${python[@]}" "$config" "${config_arguments[@]}" "$folder" "$PWD"'
    words, job = ["bash", "-c", f"{settings}\n{show}"], {"SLURM_JOB_ID": "7"}
    done = subprocess.run(words, capture_output=True, env=os.environ | job)
    run_folder = folder / HOSTILE / "a b"
    expected = ["/a b/python", folder / config, *arguments, run_folder, folder]
    assert done.stdout.decode().split("\0")[:-1] == [str(each) for each in expected]
    assert {each.name for each in folder.iterdir()} == {"a b.toml", "job.sh"}
    assert "#SBATCH --job-name=a_b" in settings


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "3-2"], "--nodes '3-2' must be a number from 1"),
        (["--nodes", "2;x"], "--nodes '2;x' must be"),
        (["--time", "1:00\n#SBATCH -x"], "is no time limit"),
        (["--time", "1:"], "is no time limit"),
        (["--time", "03:00"], "--time 03:00 is over before --signal-seconds = 180"),
        (["--time", "3"], "--time 3 is over before"),
        (["--signal-seconds", "70000"], "must be from 1 to 65535"),
        (["--sbatch", "a\nb"], "--sbatch 'a\\nb' must be one option"),
        (["--python", "a 'b"], "--setup and --python must be complete words of bash"),
        (["--setup", "if true"], "--setup and --python must be complete words of bash"),
        (["--out", "/dev/null/x"], "--out = /dev/null/x"),
        (["--nodes", "4"], "[data] batch_multiple = 4 cannot be divided among 8"),
        (["--nodes", "1-4"], "[data] batch_multiple = 4 cannot be divided among 6"),
        (["--optimizer.beta1", "2"], "[optimizer] beta1 = 2.0"),
        (["--wait"], "--wait needs --submit"),
        (["--submit", "--price", "2"], "--price needs --wait"),
        (["--submit", "--wait", "--price", "-2"], "--price = -2.0, but it must be from 0"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments, sentence, capsys):
    # On 4 nodes only the data's rule is broken.
    assert cli.main([*DEBUG, *arguments, "--training.global_batch_size=24"]) == 2
    found = capsys.readouterr()
    assert sentence in found.err and found.err.count("\n") == 1 and not found.out


SQUEUE = """
PENDING|2|0:00|Resources|2026-11-25T20:00:00
RUNNING|2|30:00|None|2026-11-25T20:00:00
error Unable to contact slurm controller (connect failure)
PENDING|2-4|0:00|BeginTime|N/A
RUNNING|3|1-00:10:00|None|2026-11-25T21:00:00
COMPLETED|3|1-00:20:00|None|2026-11-25T21:00:00
"""
ANSWER = """#!/bin/bash
{{ read -r word rest; mapfile -t others; }} < {file}.txt; printf '%s\\n' "${{others[@]}}" > {file}.txt
[ -t 0 ] || /bin/cat > {file}.stdin; echo "$*" > {file}.arguments
[ "$word" = error ] && printf "$rest\\n" >&2 && exit 1; echo "$word"
"""


@pytest.mark.long
def test_submit_and_wait(tmp_path, monkeypatch, capsys):
    """Pending, run twice by two and by three nodes of two GPUs, and completed."""
    (tmp_path / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path))
    submit = [*DEBUG, "--submit", "--out", str(tmp_path / "out")]
    assert cli.main(submit) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    for name, lines in (("sbatch", "17\n"), ("squeue", SQUEUE)):
        (tmp_path / f"{name}.txt").write_text(lines.lstrip())
        (tmp_path / name).write_text(ANSWER.format(file=tmp_path / name))
        (tmp_path / name).chmod(0o755)
    pauses = []
    monkeypatch.setattr(slurm_queue.time, "sleep", pauses.append)
    assert cli.main([*submit, "--wait", "--price", "3"]) == 0
    found = capsys.readouterr()
    assert found.out == "17\n" and pauses[:2] == [2, 2]
    said = re.sub(r"after [\d:]+\d", "after T", found.err).splitlines()
    pending = "job 17 after T: PENDING (Resources), start expected at 2026-11-25T20"
    assert said[0].startswith(pending) and "unknown (Unable to contact" in said[2]
    assert said[5] == "job 17 after T: COMPLETED; 148.00 GPU hours, cost: 444.00"
    costs = [float(line.rpartition(" ")[2]) for line in said]
    assert costs == [0, 6, 6, 6, 6 + 3 * 145, 6 + 3 * 146]
    (tmp_path / "sbatch.txt").write_text("17;cluster\nerror Socket timed out on send/recv\\nx\n")
    assert cli.main(submit) == 0 and capsys.readouterr().out == "17\n"
    assert (tmp_path / "sbatch.arguments").read_text() == "--parsable\n"
    assert (tmp_path / "sbatch.stdin").read_bytes() == (tmp_path / "out").read_bytes()
    assert cli.main([*submit, "--wait"]) == 2
    expected = "error: --submit: sbatch refuses the job (Socket timed out on send/recv)\n"
    assert capsys.readouterr().err == expected


def test_the_image_has_what_the_package_asks_for():
    """buildah 1.28 builds it, and hadolint 2.15 has nothing against it."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    program = re.search(r"python -c '(.*?)'", text)[1]
    words = [sys.executable, "-c", program, arguments["EXTRAS"]]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    extras = map(project["optional-dependencies"].get, arguments["EXTRAS"].split(","))
    wanted = sum(extras, project["dependencies"])
    assert asked.splitlines() == wanted and not any("titan-tts" in each for each in wanted)
    assert f'"torch=={arguments["TORCH"]}"' in (ROOT / "scripts/setup.sh").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert copied == {each[1:] for each in ignored if each.startswith("!")} and ignored[0] == "*"
    _, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    user = job["spec"]["template"]["spec"]["securityContext"]
    assert re.findall(r"^USER (.*)$", text, re.M) == [f"{user['runAsUser']}:{user['fsGroup']}"]
    assert f"useradd --uid {user['runAsUser']} " in text and user["runAsNonRoot"]


def test_the_example_for_kubernetes(capsys):
    """Its command parses, and its numbers fit each other. kubernetes-validate 1.37 accepts it."""
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    options, first = {}, f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    for word in container["command"][3:]:
        key, _, value = word.removeprefix("--").partition("=")
        options[key] = value
    assert container["command"][:2] == ["titan-tts", "train"]
    assert find_config(container["command"][2]).is_file()
    assert spec["completions"] == spec["parallelism"] == int(options["nodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc"])
    assert options["rendezvous"] == f"{first}:29500"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
