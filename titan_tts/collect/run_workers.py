"""Workers as processes of this machine, which are watched."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from titan_tts.collect.queue import Queue
from titan_tts.collect.worker import Job, Unsound, work
from titan_tts.launch.supervisor import interrupt_on_signals
from titan_tts.overlay import call_in_overlay
from titan_tts.prepare.executors import obey_parent
from torchtitan.models.dit_tts.errors import InputError, require, show

_EXIT_AGAIN = 75  # of a worker in whose place a new process should go on
_POLL_SECONDS = 1.0
_MAX_FRUITLESS = 5  # processes in turn that end before they have a job
_MAX_ALIKE = 3  # failures of an analysis in turn, all by the same error, while it has done nothing


class _Worker(NamedTuple):
    process: BaseProcess
    errors: Connection
    device: str


def run_here(
    job: Job, devices: list[str], count: int, queue: Queue, watch: Callable[[], None]
) -> None:
    """Runs `count` workers, which take `devices` in turn, until the queue is empty; `watch` is called meanwhile.

    A process that ends early (killed, out of memory, an error of its GPU) fails the job that it had, and a new one
    takes its place. The InputError of a worker ends all, and so does an analysis that fails for each recording alike.
    """
    workers: dict[str, _Worker] = {}
    fruitless, done, failures = 0, queue.counts()["done"], list[str]()
    interrupt_on_signals()  # claims are given back at once, not when they expire
    try:
        for number in range(count):
            workers |= _started(job, devices[number % len(devices)], count)
        while workers:
            time.sleep(_POLL_SECONDS)
            watch()
            for name, worker in [*workers.items()]:
                status = worker.process.exitcode
                said = ""
                if status in (2, _EXIT_AGAIN):
                    with suppress(EOFError):  # nothing was said: a plug-in ended the process
                        said = worker.errors.recv()
                if said and status == 2:
                    raise InputError(said)
                if status is not None:
                    del workers[name]
                if said:
                    if said not in failures:
                        show(f"an analysis failed, and is tried again: {said}")
                    failures.append(said)
                    require(
                        failures[-_MAX_ALIKE:] != [said] * _MAX_ALIKE
                        or queue.counts()["done"] > done,
                        f"the analysis fails for each recording alike ({said}); mend it and start again",
                    )
                if status:
                    had_a_job = queue.fail_claims(name, _how_it_ended(status))
                    fruitless = 0 if had_a_job or status == _EXIT_AGAIN else fruitless + 1
                    require(
                        fruitless < _MAX_FRUITLESS,
                        f"workers end before they have a job; the last: {_how_it_ended(status)}",
                    )
                    workers |= _started(job, worker.device, count)
    finally:
        for worker in workers.values():
            worker.process.terminate()
        for name, worker in workers.items():
            worker.process.join()
            queue.release_claims(name)


def _started(job: Job, device: str, count: int) -> dict[str, _Worker]:
    context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
    errors, theirs = context.Pipe(duplex=False)
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    arguments = (theirs, threads, asdict(job), name, device)
    target = "titan_tts.collect.run_workers:main"
    process = context.Process(target=call_in_overlay, args=(target, *arguments))
    process.start()
    theirs.close()
    return {name: _Worker(process, errors, device)}


def main(errors: Connection, threads: int, job: dict[str, Any], name: str, device: str) -> None:
    """A worker's process."""
    obey_parent()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is imported
    try:
        work(Job(**job), name, device)
    except Unsound as error:
        errors.send(str(error))
        sys.exit(_EXIT_AGAIN)
    except (InputError, ModuleNotFoundError) as error:
        errors.send(str(error))
        sys.exit(2)


def _how_it_ended(status: int) -> str:
    if status > 0:
        return f"its worker process ended with status {status}; its error stands in the log"
    name = signal.Signals(-status).name
    return f"its worker process was ended by {name}; if nobody did that, use fewer --workers: it had too little memory"
