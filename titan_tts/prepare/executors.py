"""Run many jobs of one function: in this process, in processes of this machine, or on a Ray cluster.

Jobs are tuples of plain values and results plain dicts, in any order. The function is named
"module:function", as new processes need our overlay of torchtitan before they can import it.
Everything a job makes is a file, so a job that is lost or done twice does no harm.
"""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, cast

from titan_tts.overlay import call_in_overlay
from torchtitan.models.dit_tts.errors import InputError

Runner = Callable[[str, Iterable[tuple]], Iterator[dict[str, Any]]]

# Packages of the speech extra; the samples' bytes may depend on their versions.
LIBRARIES = ("soundfile", "soxr", "pyloudnorm", "av", "pyarrow")
_PACKAGE = "titan_tts"
# Starting a process takes as long as this many chunks of a light codec.
JOBS_WORTH_A_PROCESS = 32
# More would wait for the GPU, each with a codec of its own in its memory.
MAX_PROCESSES_PER_GPU = 4
MAX_RAY_BLOCKS = 1000


def default_workers(jobs: int, devices: list[str], engine: str = "local") -> int:
    """Processes for this many jobs: at most one per core, at least one per device."""
    limit = len(os.sched_getaffinity(0))
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
    """Versions of the packages on which the samples' bytes may depend."""
    return {name: version(name) for name in ("torch", "numpy", "scipy", *LIBRARIES)}


@contextmanager
def open_engine(name: str, workers: int, devices: list[str]) -> Iterator[Runner]:
    """A runner of jobs, for several stages one after the other.

    `runner("module:function", jobs)`, the module below titan_tts/, yields the results of
    function(*job, device) for all jobs, as they come. The processes take `devices` in turn; a single
    process of the local engine is this one.
    """
    if name == "ray":
        with _ray(workers, devices) as runner:
            yield runner
    elif workers <= 1 and len(devices) == 1:
        yield lambda function, jobs: (_call(function, *job, devices[0]) for job in jobs)
    else:
        with _processes(max(workers, len(devices)), devices) as runner:
            yield runner


def _call(function: str, *args: Any) -> dict[str, Any]:
    return cast(dict, call_in_overlay(f"{_PACKAGE}.{function}", *args))


_device = ""  # of this worker


def start_worker(devices: Any) -> None:
    """Starts a new process: it takes a device from the queue."""
    global _device
    _device = devices.get()
    obey_parent()


def obey_parent() -> None:
    """Lets this process end with its parent, also a killed one."""
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def work(function: str, *job: Any) -> dict[str, Any]:
    """Do one job in a worker."""
    return _call(function, *job, _device)


@contextmanager
def _processes(workers: int, devices: list[str]) -> Iterator[Runner]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
    queue = context.SimpleQueue()
    for number in range(workers):
        queue.put(devices[number % len(devices)])
    start = (f"{_PACKAGE}.prepare.executors:start_worker", queue)
    pool = ProcessPoolExecutor(workers, context, call_in_overlay, start)

    def runner(function: str, jobs: Iterable[tuple]) -> Iterator[dict[str, Any]]:
        target = f"{_PACKAGE}.prepare.executors:work"
        try:
            futures = {pool.submit(call_in_overlay, target, function, *job) for job in jobs}
            for future in as_completed(futures):
                yield cast(dict, future.result())
        except BrokenProcessPool:
            raise InputError(
                "a worker process was killed, probably out of memory; start again with fewer than "
                f"--workers {workers}, finished work is kept"
            ) from None

    try:
        yield runner
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _ray(workers: int, devices: list[str]) -> Iterator[Runner]:
    """Ray Data over the jobs; every node has to see source and output under the same path."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise InputError(
            "--engine ray needs the package ray, which is not installed; run "
            "pip install 'titan-tts[ray]' or take --engine local"
        ) from None

    on_gpu = devices[0] != "cpu"

    def runner(function: str, jobs: Iterable[tuple]) -> Iterator[dict[str, Any]]:
        target = f"{_PACKAGE}.{function}"

        def call(row: dict[str, str]) -> dict[str, str]:
            device = "cuda:0" if on_gpu else "cpu"  # Ray shows a task its own GPU only
            result = call_in_overlay(target, *json.loads(row["job"]), device)
            return {"result": json.dumps(result)}

        rows = [{"job": json.dumps(job)} for job in jobs]
        if rows:
            data = ray.data.from_items(rows, override_num_blocks=min(len(rows), MAX_RAY_BLOCKS))
            results = data.map(call, num_cpus=1, num_gpus=1 if on_gpu else None)
            for row in results.iter_rows():
                yield json.loads(row["result"])

    started = not ray.is_initialized()
    if started:
        # A cluster's address comes from RAY_ADDRESS, as for every Ray program.
        ray.init(
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.WARNING,
            num_cpus=None if os.environ.get("RAY_ADDRESS") else max(workers, 1),
        )
    # It would log each stage's plan and draw bars into ours.
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield runner
    finally:
        if started:
            ray.shutdown()
