"""The batch script of a SLURM job: directives, settings, and `job.sh`, which all jobs share."""

import shlex
from dataclasses import dataclass
from pathlib import Path

_BODY = Path(__file__).with_name("job.sh")
_FIRST_PORT, _PORTS = 15000, 15000
"""below Linux's ephemeral ports, which begin at 32768"""


@dataclass
class Job:
    """The values in which two jobs' scripts differ; every text is checked before or quoted here."""

    directives: list[str]
    """of sbatch, without the dashes: `partition=gpu`"""

    python: list[str]
    """words of the command that starts Python"""

    config: Path
    config_args: list[str]
    run_folder: Path
    work_folder: Path
    gpus_per_node: int
    max_requeues: int
    port: int
    """0: from the job's id"""

    setup: list[str]
    """lines of shell"""

    variables: dict[str, str]
    """of the environment"""


def _words(values: list[str]) -> str:
    return f"({' '.join(map(shlex.quote, values))})"


def batch_script(job: Job) -> str:
    """The complete script, for sbatch or, inside an allocation, for bash."""
    port = str(job.port) if job.port else f"$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"
    settings = [
        f"cd -- {shlex.quote(str(job.work_folder))} || exit 1",
        *(f"{line} || exit 1" for line in job.setup),
        "set -uo pipefail",  # not before: activating an environment may read what is not set
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()),
        f"python={_words(job.python)}",
        f"config={shlex.quote(str(job.config))}",
        f"config_arguments={_words(job.config_args)}",
        f"folder={shlex.quote(str(job.run_folder))}",
        f"gpus_per_node={job.gpus_per_node}",
        f"max_requeues={job.max_requeues}",
        f"port={port}",
    ]
    head = ["#!/usr/bin/env bash", *(f"#SBATCH --{each}" for each in job.directives)]
    return "\n".join([*head, "", *settings, "", _BODY.read_text()])
