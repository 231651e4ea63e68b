"""A job in SLURM's queue: submitted, and followed to its end, with its cost so far."""

import subprocess
import sys
import time
from datetime import timedelta

from torchtitan.models.dit_tts.errors import InputError

_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
_LONGEST_PAUSE = 60
"""seconds between questions to SLURM, which forgets a job five minutes after its end"""
_SAID_EVERY = 600
"""seconds, if nothing changes"""


def submit(script: str) -> str:
    """Submits the script. Returns the job's id."""
    try:
        command = ["sbatch", "--parsable"]
        done = subprocess.run(command, input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(
            "--submit: there is no sbatch here; run this on a machine of the cluster, or write the "
            "script with --out and submit it there"
        ) from None
    if done.returncode:
        reason = done.stderr.strip().split("\n")[0] or f"exit status {done.returncode}"
        raise InputError(f"--submit: sbatch refuses the job ({reason})")
    return done.stdout.strip().partition(";")[0]  # behind it the cluster's name


def follow(job: str, gpus_per_node: int, price: float) -> int:
    """Says on stderr what the job does and has cost, until it has ended. Returns 0 if it is completed."""
    began, said, pause, before = time.monotonic(), 0.0, 2, ""
    earlier = now = 0  # GPU seconds of earlier starts and of the last one
    while True:
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job}"]
        command.append("--format=%T|%D|%M|%r|%S")
        done = subprocess.run(command, capture_output=True, text=True)
        state, found = "", f"unknown ({done.stderr.strip()})"  # the controller may be away
        if "Invalid job id" in done.stderr or not (done.returncode or done.stdout):
            raise InputError(f"SLURM no longer knows job {job}; its log tells how it ended")
        if done.returncode == 0:
            state, nodes, clock, reason, start = done.stdout.strip().split("|")
            used = 0 if state == "PENDING" else int(nodes) * gpus_per_node * seconds_of(clock)
            earlier, now = earlier + (now if used < now else 0), used
            found = state if reason == "None" else f"{state} ({reason})"
            if state == "PENDING" and start != "N/A":
                found += f", start expected at {start}"
        if found != before or time.monotonic() - said > _SAID_EVERY:
            said, hours = time.monotonic(), (earlier + now) / 3600
            cost = f", cost: {hours * price:.2f}" if price else ""
            after = timedelta(seconds=round(said - began))
            line = f"job {job} after {after}: {found}; {hours:.2f} GPU hours{cost}"
            print(line, file=sys.stderr, flush=True)
        if state in _ENDED.split():
            return int(state != "COMPLETED")
        pause = min(2 * pause, _LONGEST_PAUSE) if found == before else 2
        before = found
        try:
            time.sleep(pause)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"job {job} stays in the queue (scancel {job})") from None


def seconds_of(text: str) -> int:
    """Of SLURM's [D-][HH:]MM:SS."""
    days, _, clock = text.rpartition("-")
    parts = enumerate(reversed(clock.split(":")))
    return 86400 * int(days or 0) + sum(60**place * int(part) for place, part in parts)
