"""Does the jobs of a stage: with a bar, and a bounded number of attempts for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from titan_tts.jobs.engines import Failure, Runner
from titan_tts.jobs.workspace import cannot_write
from torchtitan.models.dit_tts.errors import InputError, show

ATTEMPTS = 3
_MAX_ALIKE = 3  # failures in turn, all by the same error, while nothing was done


@dataclass(frozen=True)
class Job:
    """One call of a stage's function.

    Attributes:
        name: for messages.
        values: arguments of the function, before the device.
        work: how much it is, in the unit of the bar.
        tried: attempts that have failed before; the job stays the same one.
    """

    name: str
    values: tuple
    work: float = 1
    tried: int = field(default=0, compare=False)


def progress(
    action: str, unit: str, jobs: Iterable[Job], done: float = 0, **options: Any
) -> AbstractContextManager[Any]:
    """A bar over the work of all jobs, `done` of which was done before.

    The time left is that of the mean rate so far: smoothed, it would be that of the last moment.
    """
    total = done + sum(job.work for job in jobs)
    return tqdm(desc=action, total=total, initial=done, unit=unit, smoothing=0, **options)


def run_jobs(
    runner: Runner,
    function: str,
    jobs: Sequence[Job],
    bar: Any,
    place: object,
    failed: Callable[[Job, str], None] | None = None,
    attempts: int = ATTEMPTS,
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yields (job, result) as they end. One that fails is tried again after the others.

    Args:
        place: the folder that messages name.
        failed: is told of each attempt that fails, as a job with that attempt counted and the reason; after `attempts`
            the job is left out. Without it a failure ends all: an input's at once, any other after `attempts`.
    """
    done, alike, last = 0, 0, ""
    left = list(jobs)
    while left:
        again = []
        for number, answer in runner(function, [job.values for job in left]):
            job = left[number]
            if not isinstance(answer, Failure):
                done += 1
                bar.update(job.work)
                yield job, answer
                continue
            kind, reason = answer
            if kind == "disk":
                raise InputError(cannot_write(place, reason))
            if kind == "input" and failed is None:
                raise InputError(reason)
            alike, last = alike + 1 if kind == "error" and reason == last else 1, reason
            if kind == "error" and alike >= _MAX_ALIKE and not done:
                raise InputError(f"each job fails alike ({reason}); correct it and start again")
            job = replace(job, tried=job.tried + 1)
            if failed is not None:
                failed(job, reason)
            if job.tried < attempts:
                again.append(job)
                if kind != "input":
                    show(f"{job.name} is tried again: {reason}")
            elif failed is None:
                raise InputError(
                    f"{place}: {job.name} failed {job.tried} times, the last time because {reason}; start again, finished "
                    "work is kept"
                )
            else:
                bar.update(job.work)
        left = again
