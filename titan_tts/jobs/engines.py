"""Engines that do jobs: this process, processes of this machine, or actors on a Ray cluster.

A job is the arguments of a function: plain values. The function is named "module:function", because new processes need
our overlay of torchtitan before they can import it. It gets the job's values and a device, and returns a dict.
Whatever it makes is a file that appears complete or not at all, so a job that is lost or done twice does no harm.

A worker that is killed, or whose job ended by an error that is not its input's, is replaced by a new one: it costs
that job an attempt and nothing else.
"""

import logging
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

from titan_tts.overlay import call_in_overlay
from torchtitan.models.dit_tts.errors import InputError, first_line, require
from torchtitan.models.dit_tts.run.launcher import die_with_parent

# Packages of the speech extra; the bytes of what is made may depend on their versions.
LIBRARIES = ("soundfile", "soxr", "pyloudnorm", "av", "pyarrow")
# Starting a process takes as long as this many chunks of a light codec.
JOBS_WORTH_A_PROCESS = 32
# More would wait for the GPU, each with a codec of its own in its memory.
MAX_PROCESSES_PER_GPU = 4


def cores() -> int:
    """Cores that this process may use; all of the machine's where the system has no affinity, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers(jobs: int, devices: list[str], engine: str = "local") -> int:
    """Processes for this many short jobs: at most one per core, at least one per device."""
    limit = cores()
    if devices[0] != "cpu" and engine == "local":  # Ray gives each job a GPU of its own
        limit = min(limit, MAX_PROCESSES_PER_GPU * len(devices))
    return max(len(devices), min(limit, jobs // JOBS_WORTH_A_PROCESS), 1)


def codec_devices(device: str, engine: str = "local") -> list[str]:
    """The devices of `--device`: "auto" is every GPU, or the CPU; "cuda" every GPU."""
    import torch

    if engine == "ray" and device.startswith("cuda"):
        return ["cuda:0"]  # Ray deals out the cluster's GPUs; this machine need not have one
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device == "auto":
        return gpus or ["cpu"]
    devices = gpus if device == "cuda" and gpus else [name.strip() for name in device.split(",")]
    for name in devices:
        if name != "cpu" and name not in gpus:
            there = ", ".join(["cpu", *gpus])
            raise InputError(f"--device names {name!r}; this machine has {there}")
    return devices


def library_versions() -> dict[str, str]:
    """Versions of the packages on which the bytes of what is made may depend."""
    return {name: version(name) for name in ("torch", "numpy", "scipy", *LIBRARIES)}


_MAX_FRUITLESS = 5  # workers in turn that end before they are ready


class JobError(Exception):
    """A job's failure that is not its input's fault: its process and GPU may be in any state. The message is shown."""


class Failure(NamedTuple):
    """A job without a result.

    Attributes:
        kind: "input" (an InputError: the process is sound), "disk" (an OSError), "error" (any other exception) or
            "killed" (its process ended).
        reason: for the user.
    """

    kind: str
    reason: str


Answer = dict[str, Any] | Failure


Runner = Callable[[str, Sequence[tuple]], Iterator[tuple[int, Answer]]]
"""Does jobs by a function: yields (number of the job, its answer) as they end, in any order."""


@contextmanager
def open_engine(name: str, workers: int, devices: list[str], here: bool = True) -> Iterator[Runner]:
    """A runner of jobs, for several stages one after the other.

    Args:
        name: "local" or "ray". Every node of a cluster has to see the files under the same paths.
        devices: the processes take them in turn.
        here: whether a single local worker may be this process, which a job that is killed would take with it.
    """
    if name == "ray":
        with _ray(workers, devices) as start, _pool(start, _wait_for_actors) as runner:
            yield runner
    elif here and workers <= 1 and len(devices) == 1:
        yield lambda function, jobs: (
            (number, attempt(function, job, devices[0])) for number, job in enumerate(jobs)
        )
    else:
        count = max(workers, len(devices))
        threads = max(1, cores() // count)
        in_turn = [devices[number % len(devices)] for number in range(count)]
        starts = [lambda each=each: _Process(each, threads) for each in in_turn]
        with _pool(starts, _wait_for_processes) as runner:
            yield runner


def attempt(function: str, job: tuple, device: str) -> Answer:
    """Does one job in this process."""
    try:
        return cast(dict, call_in_overlay(function, *job, device))
    except InputError as error:
        return Failure("input", str(error))
    except Exception as error:
        if os.environ.get("TITAN_TTS_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, OSError):
            path = f"{error.filename}: " if error.filename else ""
            return Failure("disk", f"{path}{error.strerror or error}")
        kind = "" if isinstance(error, JobError) else f"{type(error).__name__}: "
        return Failure("error", f"{kind}{first_line(error)}")


@dataclass(eq=False)
class _Place:
    """A worker and its state; `job` is the number of the job that it has."""

    start: Callable[[], "_Worker"]
    worker: "_Worker | None" = None
    is_ready: bool = False
    job: int | None = None


@contextmanager
def _pool(
    starts: Sequence[Callable[[], "_Worker"]],
    wait_for: Callable[[list[Any]], list[Any]],
) -> Iterator[Runner]:
    """A runner over workers, which are started when there is a job for them. A worker says None once it is ready, then
    an answer for each job that it is given."""
    places = [_Place(start) for start in starts]

    def runner(function: str, jobs: Sequence[tuple]) -> Iterator[tuple[int, Answer]]:
        left, fruitless = deque(range(len(jobs))), 0
        while left or any(place.job is not None for place in places):
            for place in places:
                if place.worker and place.is_ready and place.job is None and left:
                    place.job = left.popleft()
                    place.worker.give(function, jobs[place.job])
            starting = sum(place.worker is not None and not place.is_ready for place in places)
            absent = [place for place in places if place.worker is None]
            for place in absent[: max(0, len(left) - starting)]:
                place.worker = place.start()
            by_worker = {place.worker: place for place in places if place.worker}
            for worker in wait_for([*by_worker]):
                place, answer = by_worker[worker], worker.heard()
                ended = isinstance(answer, Failure) and answer.kind in ("killed", "error")
                number, place.job = place.job, None
                if ended:
                    worker.end(at_once=True)
                    place.worker = None
                    fruitless = 0 if place.is_ready else fruitless + 1
                    require(
                        fruitless < _MAX_FRUITLESS,
                        f"workers end before they have a job; the last one: {answer and answer[1]}",
                    )
                place.is_ready = not ended
                if number is not None and answer is not None:
                    yield number, answer

    at_once = True
    try:
        yield runner
        at_once = False
    finally:
        for place in places:
            if place.worker:
                place.worker.end(at_once)


class _Process:
    """A process of this machine."""

    def __init__(self, device: str, threads: int):
        context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
        self.connection, theirs = context.Pipe()
        arguments = ("titan_tts.jobs.engines:serve", theirs, device, threads)
        self._process = context.Process(target=call_in_overlay, args=arguments)
        self._process.start()
        theirs.close()

    def give(self, function: str, job: tuple) -> None:
        with suppress(OSError):  # it has ended, as the next look will tell
            self.connection.send((function, job))

    def heard(self) -> Answer | None:
        try:
            return cast(Answer | None, self.connection.recv())
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            by = signal.Signals(-status).name if status < 0 else f"itself with status {status}"
            advice = "if nobody killed it, use fewer --workers: it had too little memory"
            return Failure("killed", f"its worker process was ended by {by}; {advice}")

    def end(self, at_once: bool) -> None:
        if at_once:
            self._process.kill()
        self.connection.close()  # an idle one ends by that
        self._process.join()


def _wait_for_processes(workers: list[_Process]) -> list[_Process]:
    found = wait([worker.connection for worker in workers])
    return [worker for worker in workers if worker.connection in found]


def serve(connection: Connection, device: str, threads: int) -> None:
    """The main function of a worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is imported
    answer: Answer | None = None
    with suppress(EOFError, BrokenPipeError):
        while not (isinstance(answer, Failure) and answer.kind == "error"):
            connection.send(answer)
            function, job = connection.recv()
            answer = attempt(function, job, device)
        connection.send(answer)


class _RayActor:
    """An actor on a Ray cluster."""

    def __init__(self, actor_class: Any, device: str):
        self._actor, self._device = actor_class.remote(), device
        self.said: Any = self._actor.ready.remote()  # None once it is heard

    def give(self, function: str, job: tuple) -> None:
        self.said = self._actor.attempt.remote(function, job, self._device)

    def heard(self) -> Answer | None:
        import ray

        said, self.said = self.said, None
        try:
            return cast(Answer | None, ray.get(said))
        except ray.exceptions.RayError as error:
            return Failure("killed", f"its Ray worker was lost ({first_line(error)})")

    def end(self, at_once: bool) -> None:
        import ray

        ray.kill(self._actor)


_Worker = _Process | _RayActor


def _wait_for_actors(workers: list[_RayActor]) -> list[_RayActor]:
    import ray

    found = ray.wait([worker.said for worker in workers if worker.said is not None])[0]
    return [worker for worker in workers if worker.said in found]


@contextmanager
def _ray(workers: int, devices: list[str]) -> Iterator[list[Callable[[], _Worker]]]:
    """Starts of actors: one for each GPU of the cluster, or on CPUs one for each core; `workers` is for a
    cluster that this process starts."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "--engine ray needs the package ray, which is not installed; run "
            "pip install 'titan-tts[ray]' or take --engine local"
        ) from None

    class Actor:  # pickled by value: nothing of ours is imported where it runs
        def ready(self) -> None:
            return None

        def attempt(self, function: str, job: tuple, device: str) -> Any:
            return call_in_overlay("titan_tts.jobs.engines:attempt", function, job, device)

    started = not ray.is_initialized()
    if started:
        # A cluster's address comes from RAY_ADDRESS, as for every Ray program; one that merely runs on
        # this machine, or ran, is not taken.
        own = None if os.environ.get("RAY_ADDRESS") else max(workers, 1)
        ray.init(
            address="local" if own else None,
            num_cpus=own,
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    try:
        on_gpu = devices[0] != "cpu"
        count = int(ray.cluster_resources().get("GPU" if on_gpu else "CPU", 1))
        limits = {"num_cpus": 1, "num_gpus": int(on_gpu), "scheduling_strategy": "SPREAD"}
        actor_class = ray.remote(Actor).options(**limits)
        device = "cuda:0" if on_gpu else "cpu"  # Ray shows an actor its own GPU only
        yield [lambda: _RayActor(actor_class, device)] * max(count, 1)
    finally:
        if started:
            ray.shutdown()
