"""`titan-tts launch`: a run as a SLURM job, which is requeued at its time limit until the run is complete."""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from titan_tts.launch.slurm_queue import follow, seconds_of, submit
from titan_tts.launch.supervisor import FIRST_PORT, PORTS
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError, check_range, require
from torchtitan.models.dit_tts.files import check_writable, write_atomic

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.config.job_config import JobConfig

_BODY = Path(__file__).with_name("job.sh")
_MAX_NODES = 10_000
_TIME = re.compile(r"\d+(-\d+)?(:\d+){0,2}", re.ASCII)


@dataclass
class Options:
    """Print, write or submit the SLURM job of a run.

    The job ends its run before the time limit, with a checkpoint, and is requeued until the run is
    complete. The config is checked first, for every number of nodes that the job may get.
    """

    config: tyro.conf.Positional[str]
    """TOML file, or the name of a config that `titan-tts configs` lists."""

    nodes: str = "1"
    """Machines: N, or MIN-MAX; the job then runs on as many as SLURM has."""

    gpus_per_node: int = 8
    """Processes per machine, one per GPU."""

    time: str = "24:00:00"
    """Time limit of each start, as sbatch takes it: HH:MM:SS, D-HH:MM ..."""

    signal_seconds: int = 180
    """Seconds before the time limit at which SLURM signals the run to save and end: more than a step and a
    save take. SLURM may be up to a minute early."""

    max_requeues: int = 100
    """Maximum number of requeues; 0: never requeue."""

    cpus_per_node: int = 0
    """CPUs of each machine for the job; 0: the whole machine with all of its memory."""

    no_gpu_request: bool = False
    """Do not request GPUs from SLURM: it does not know of them, or the processes run on CPUs."""

    sbatch: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """An option of sbatch without its dashes: partition=gpu, account=mine, constraint=h200. May be given again."""

    setup: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """A line of shell before the start: "module load cuda", "export NCCL_SOCKET_IFNAME=ib0". May be given again."""

    python: str = ""
    """Command that starts Python on every machine: "apptainer exec --nv image.sif python", or "python" for the one
    that --setup has put into PATH; empty: this Python."""

    port: int = 0
    """Port on the first machine for the rendezvous; 0: derived from the job's id."""

    out: Path | None = None
    """Write the script to this file."""

    submit: bool = False
    """Submit the script and print the job's id."""

    wait: bool = False
    """With --submit: say on stderr what the job does and has cost, until it has ended. The exit status is 0 if it is
    completed."""

    price: float = 0.0
    """With --wait: price of one GPU for an hour, in any currency; 0: only GPU hours are shown."""

    config_args: tyro.conf.Suppress[list[str]] = field(default_factory=list)


def run(options: Options) -> int:
    smallest, largest = _node_range(options.nodes)
    _check_numbers(options)
    path = find_config(options.config).resolve()

    from torchtitan.models.dit_tts.config.manager import load_config, run_folder_path

    config = load_config(["--job.config_file", str(path), *options.config_args])
    _check_sizes(config, options, range(smallest, largest + 1))
    script = _script(options, path, config.job.experiment, run_folder_path(config).absolute())
    _check_script(script)
    if options.out is not None:
        check_writable(options.out, "--out")
        write_atomic(options.out.expanduser(), script)
    if options.submit:
        print(job := submit(script), flush=True)
        if options.wait:
            return follow(job, options.gpus_per_node, options.price)
    elif options.out is None:
        print(script, end="")
    return 0


def _node_range(text: str) -> tuple[int, int]:
    """(min, max) of `N` or `MIN-MAX`."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    if found:
        smallest, largest = int(found[1]), int(found[2] or found[1])
        if 1 <= smallest <= largest <= _MAX_NODES:
            return smallest, largest
    raise InputError(
        f"--nodes {text!r} must be a number from 1 to {_MAX_NODES}, or a range such as 2-4"
    )


def _check_numbers(options: Options) -> None:
    check_range("--gpus-per-node", options.gpus_per_node, 1, 1024)
    check_range("--signal-seconds", options.signal_seconds, 1, 65535)  # sbatch's limit
    check_range("--max-requeues", options.max_requeues, 0, 10**6)
    check_range("--cpus-per-node", options.cpus_per_node, 0, 10**5)
    check_range("--port", options.port, 0, 65535)
    check_range("--price", options.price, 0, 10**6)
    require(options.submit or not options.wait, "--wait needs --submit; give both")
    require(options.wait or not options.price, "--price needs --wait; give both")
    if not _TIME.fullmatch(options.time):
        raise InputError(f"--time {options.time!r} is no time limit; give HH:MM:SS or D-HH:MM:SS")
    limit = 60 * int(options.time) if options.time.isdecimal() else seconds_of(options.time)
    require(
        "-" in options.time or limit > options.signal_seconds,
        f"--time {options.time} is over before --signal-seconds = {options.signal_seconds}, so every start would end at "
        f"once; give more time",
    )


def _check_sizes(config: "JobConfig", options: Options, sizes: range) -> None:
    """Raises InputError if the config does not work on one of these numbers of nodes."""
    from torchtitan.models.dit_tts.config.checks import validate_config
    from torchtitan.models.dit_tts.model_config import model_flavors

    flavors = list(model_flavors())
    # The machine of this command may have no GPU.
    accelerator = "cpu" if options.no_gpu_request else "cuda"
    for nodes in sizes:
        validate_config(config, nodes * options.gpus_per_node, flavors, accelerator)


def _script(options: Options, config: Path, experiment: str, run_folder: Path) -> str:
    """Directives and settings, all checked or quoted here, and `job.sh`, which all jobs share; for sbatch or,
    inside an allocation, for bash."""
    port = str(options.port or f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))")
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{each}" for each in _directives(options, experiment)),
        "",
        f"cd -- {shlex.quote(str(Path.cwd()))} || exit 1",
        *(f"{line} || exit 1" for line in options.setup),
        "set -uo pipefail",  # not before: activating an environment may read what is not set
        f"python=({options.python or shlex.quote(sys.executable)})",
        f"config={shlex.quote(str(config))}",
        f"config_arguments=({shlex.join(options.config_args)})",
        f"folder={shlex.quote(str(run_folder))}",
        f"gpus_per_node={options.gpus_per_node}",
        f"max_requeues={options.max_requeues}",
        f"port={port}",
        "",
        _BODY.read_text(),
    ]
    return "\n".join(lines)


def _directives(options: Options, experiment: str) -> list[str]:
    directives = ["job-name=" + re.sub(r"[^\w.-]", "_", experiment, flags=re.ASCII)]
    directives += [f"nodes={options.nodes}", "ntasks-per-node=1", f"time={options.time}"]
    if not options.no_gpu_request:
        directives.append(f"gpus-per-node={options.gpus_per_node}")
    if options.cpus_per_node:
        directives.append(f"cpus-per-task={options.cpus_per_node}")
    else:
        directives += ["exclusive", "mem=0"]
    directives.append(f"signal=B:USR1@{options.signal_seconds}")
    directives.append("requeue" if options.max_requeues else "no-requeue")
    directives.append("open-mode=append")  # a requeued job continues its log
    for line in options.sbatch:
        if not line.isprintable() or not re.match(r"-{0,2}\w", line):
            raise InputError(
                f"--sbatch {line!r} must be one option of sbatch, such as constraint=h200"
            )
        directives.append(line.lstrip("-"))
    return directives


def _check_script(script: str) -> None:
    """Raises InputError for a script that bash refuses."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.partition("\n")[0]
        raise InputError(
            f"--setup and --python must be complete words of bash, which refuses them ({reason})"
        )
