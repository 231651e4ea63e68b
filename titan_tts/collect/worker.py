"""What a worker does until the queue is empty: claim a recording, analyze it, make its folder, acknowledge it.

It may be killed at any moment. A folder appears complete or not at all, and only then its job is acknowledged: who
finds a folder of a job that is not done acknowledges it. What a worker makes whose claim went to another is dropped.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titan_tts.collect.folder import MAX_RATE, PARTIAL, is_complete, write_recording
from titan_tts.collect.open_queue import open_queue
from titan_tts.collect.queue import Claim, LostClaim, Queue
from titan_tts.collect.sources import local_copy
from titan_tts.prepare.work_folder import cannot_write
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.factories import call_factory
from torchtitan.models.dit_tts.speech.audio import decode, resample

_POLL_SECONDS = 1.0
_BEATS = 4  # in a lease


@dataclass(frozen=True)
class Job:
    """All that a worker on any machine needs; plain values."""

    output: str
    queue: str  # URL; empty: the file in the output
    collection: str
    settings: dict[str, Any]  # of the analyzer
    analyzer: str = ""
    lease_seconds: float = 60.0
    max_attempts: int = 3

    def open_queue(self) -> Queue:
        return open_queue(self.queue, Path(self.output), self.collection, self.max_attempts)


class Analyzes(Protocol):
    """What --analyzer makes: see `analyze.Analyzer`."""

    def analyze(
        self, samples: np.ndarray, rate: int, progress: Callable[[str, float], None]
    ) -> list[Any]: ...


def open_analyzer(job: Job, device: str) -> Analyzes:
    if job.analyzer:
        protocol = "titan_tts/collect/analyze.py"
        return call_factory(job.analyzer, device, "analyzer", "none", ["analyze"], protocol)
    from titan_tts.collect.analyze import Analyzer
    from titan_tts.collect.settings import Settings

    return Analyzer(Settings(**job.settings), device)


def work(job: dict[str, Any], name: str, device: str) -> dict[str, Any]:
    """Works until no job is pending or claimed. Returns {"again": whether a new process should go on}."""
    plan = Job(**job)
    with closing(plan.open_queue()) as queue:
        analyzer = open_analyzer(plan, device)
        while True:
            claim = queue.claim(name, plan.lease_seconds)
            if claim is not None:
                try:
                    collect_recording(plan, queue, claim, analyzer)
                except Unsound:
                    return {"again": True}
            elif queue.counts()["claimed"]:
                time.sleep(_POLL_SECONDS)  # another's job may come back
            else:
                return {"again": False}


class Unsound(Exception):
    """A job failed by an error that is not its input's: this process and its GPU may be in any state."""


class _CannotWrite(InputError):
    """The output's disk fails, by no fault of the job."""


def collect_recording(plan: Job, queue: Queue, claim: Claim, analyzer: Analyzes) -> None:
    """Does one job: afterwards it is done, has failed, or belongs to another worker."""
    output = Path(plan.output)
    with suppress(LostClaim), Heart(plan, claim) as heart:
        seconds = 0.0
        if not is_complete(output, claim.id):
            try:
                samples, rate = _decoded(output, queue, claim)
                heart.begin("decoding", len(samples) / rate)
                segments = analyzer.analyze(samples, rate, heart.progress)
                heart.progress("figures", len(samples) / rate)
                _write(output, queue, claim, segments, (*samples.shape, rate))
            except (LostClaim, _CannotWrite):
                raise
            except Exception as error:
                if os.environ.get("TITAN_TTS_TRACEBACK"):
                    traceback.print_exc()
                known = isinstance(error, InputError)
                queue.fail(
                    claim, str(error) if known else f"{type(error).__name__}: {first_line(error)}"
                )
                if known and not heart.stages:
                    return  # it cannot be decoded, which is the recording's fault alone
                raise Unsound from error
            seconds = len(samples) / rate
            heart.progress("writing", seconds)
        queue.done(claim, seconds, heart.stages)


def _write(
    output: Path, queue: Queue, claim: Claim, segments: list[Any], audio: tuple[int, int, int]
) -> None:
    try:
        write_recording(output, claim.id, claim.token, segments, audio)
    except OSError as error:
        queue.release(claim)  # raises LostClaim where the folder was removed for that
        raise _CannotWrite(cannot_write(output, error)) from error


def _decoded(output: Path, queue: Queue, claim: Claim) -> tuple[np.ndarray, int]:
    """((n, channels) float32, rate) of the first of a job's sources that still has its content."""
    problem = InputError("no file of SOURCE has this content any more")
    for source in queue.sources(claim.id).values():
        try:
            with local_copy(source, output / PARTIAL / f"{claim.id}.{claim.token}") as path:
                samples, rate = decode(path)
        except InputError as error:
            problem = error
            continue
        if rate > MAX_RATE:
            channels = [resample(channel, rate, MAX_RATE) for channel in samples.T]
            return np.stack(channels, axis=1), MAX_RATE
        return samples, rate
    raise problem


class Heart:
    """Renews a claim's lease from a thread of its own, and measures the stages of its job.

    Attributes:
        stages: {stage: seconds that it took}.
    """

    def __init__(self, plan: Job, claim: Claim):
        self._plan, self._claim = plan, claim
        self._stopped, self._lost = threading.Event(), threading.Event()
        self._shown, self._length = "decoding", 0.0
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.stages: dict[str, float] = {}

    def __enter__(self) -> "Heart":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def begin(self, stage: str, length: float) -> None:
        """`length`: seconds of the recording, of which the time since the start was spent on `stage`."""
        self._length = length
        self.progress(stage, length)

    def progress(self, stage: str, seconds: float) -> None:
        """Called after each part of a stage. Raises LostClaim where going on is of no use."""
        now = time.monotonic()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now
        self._shown = f"{stage} {seconds / 60:.1f} of {self._length / 60:.1f} min"
        if self._lost.is_set():
            raise LostClaim(self._claim.id)

    def _beat(self) -> None:
        """Without a connection while the job is shorter than the first interval. A queue that fails is tried again at
        the next beat: if it stays away, the acknowledgement will say so."""
        while not self._stopped.wait(self._plan.lease_seconds / _BEATS):
            try:
                with closing(self._plan.open_queue()) as queue:
                    queue.heartbeat(self._claim, self._plan.lease_seconds, self._shown)
            except LostClaim:
                self._lost.set()
                return
            except InputError:
                continue
