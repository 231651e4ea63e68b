"""What a worker does until the queue is empty: claim a recording, analyze it, make its folder, acknowledge it.

It may be killed at any moment. A folder appears complete or not at all, and only then its job is acknowledged: who
finds a folder of a job that is not done acknowledges it. What a worker makes whose claim went to another is dropped.
"""

import os
import shutil
import threading
import time
import traceback
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.collect.folder import MAX_SECONDS, PARTIAL, is_complete, write_recording
from titan_tts.collect.queue import Claim, LostClaim, Queue, open_queue
from titan_tts.collect.sources import local_copy
from titan_tts.prepare.work_folder import cannot_write
from torchtitan.models.dit_tts.errors import InputError, first_line, require
from torchtitan.models.dit_tts.factories import call_factory
from torchtitan.models.dit_tts.speech.audio import decode

_POLL_SECONDS = 1.0
_BEATS = 4  # in a lease


@dataclass(frozen=True)
class Job:
    """All that a worker needs; plain values, as its process begins without our overlay."""

    output: str
    queue: str  # URL; empty: the file in the output
    collection: str
    settings: dict[str, Any]  # of the analysis, and "analyzer"
    lease_seconds: float
    max_attempts: int

    def open_queue(self) -> Queue:
        return open_queue(self.queue, Path(self.output), self.collection, self.max_attempts)

    def open_analyzer(self, device: str) -> Any:
        """An `analyze.Analyzer`, or what --analyzer makes in its place."""
        settings = dict(self.settings)
        if spec := settings.pop("analyzer"):
            protocol = "titan_tts/collect/analyze.py"
            return call_factory(spec, device, "analyzer", "none", ["analyze"], protocol)
        from titan_tts.collect.analyze import Analyzer
        from titan_tts.collect.settings import Settings

        return Analyzer(Settings(**settings), device)


class Unsound(Exception):
    """A job failed by this error, which is not its input's: this process and its GPU may be in any state."""


def work(job: Job, name: str, device: str) -> None:
    """Works until no job is pending or claimed. Raises Unsound where a new process should go on."""
    with closing(job.open_queue()) as queue:
        analyzer = job.open_analyzer(device)
        while True:
            claim = queue.claim(name, job.lease_seconds)
            if claim is not None:
                collect_recording(job, queue, claim, analyzer)
            elif queue.counts()["claimed"]:
                time.sleep(_POLL_SECONDS)  # another's job may come back
            else:
                return


def collect_recording(job: Job, queue: Queue, claim: Claim, analyzer: Any) -> None:
    """Does one job: afterwards it is done, has failed, or belongs to another worker."""
    output = Path(job.output)
    with suppress(LostClaim), Heart(job, claim) as heart:
        if is_complete(output, claim.id):
            queue.done(claim, 0.0, {})
            return
        try:
            samples, rate = _decoded(output, queue, claim)
            seconds = heart.length = len(samples) / rate
            hours = f"{seconds / 3600:.1f} hours"
            require(seconds <= MAX_SECONDS, f"has {hours}, but 27 are the most; cut it")
            heart.progress("decoding", seconds)
            segments = analyzer.analyze(samples, rate, heart.progress)
            heart.progress("figures", seconds)
        except LostClaim:
            raise
        except Exception as error:
            if os.environ.get("TITAN_TTS_TRACEBACK"):
                traceback.print_exc()
            known = isinstance(error, InputError)
            message = str(error) if known else f"{type(error).__name__}: {first_line(error)}"
            queue.fail(claim, message)
            if known and not heart.stages:
                return  # it cannot be decoded, which is the recording's fault alone
            raise Unsound(message) from error
        try:
            write_recording(output, claim.id, claim.token, segments, seconds, rate)
        except OSError as error:
            # Else the queue, on the same full disk, could not give the claim back.
            shutil.rmtree(output / PARTIAL / f"{claim.id}.{claim.token}", ignore_errors=True)
            # Raises LostClaim where the folder was removed for that; else it is the disk's fault, not the job's.
            queue.heartbeat(claim, job.lease_seconds)
            raise InputError(cannot_write(output, error)) from error
        heart.progress("writing", seconds)
        queue.done(claim, seconds, heart.stages)


def _decoded(output: Path, queue: Queue, claim: Claim) -> tuple[np.ndarray, int]:
    """((n, channels) float32, rate) of the first of a job's sources that still has its content."""
    problem = InputError("no file of SOURCE has this content any more")
    for source in queue.sources(claim.id).values():
        try:
            with local_copy(source, output / PARTIAL / f"{claim.id}.{claim.token}") as path:
                return decode(path)
        except InputError as error:
            problem = error
    raise problem


class Heart:
    """Renews a claim's lease from a thread of its own, and measures the stages of its job.

    Attributes:
        length: seconds of the recording, once they are known.
        stages: {stage: seconds that it took}.
    """

    def __init__(self, job: Job, claim: Claim):
        self._job, self._claim = job, claim
        self._stopped, self._lost = threading.Event(), threading.Event()
        self._shown, self.length = "decoding", 0.0
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.stages: dict[str, float] = {}

    def __enter__(self) -> "Heart":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def progress(self, stage: str, seconds: float) -> None:
        """Called after each part of a stage. Raises LostClaim where going on is of no use."""
        now = time.monotonic()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now
        self._shown = f"{stage} {seconds / 60:.1f} of {self.length / 60:.1f} min"
        if self._lost.is_set():
            raise LostClaim(self._claim.id)

    def _beat(self) -> None:
        """Without a connection while the job is shorter than the first interval. A queue that fails is tried again at
        the next beat: if it stays away, the acknowledgement will say so."""
        while not self._stopped.wait(self._job.lease_seconds / _BEATS):
            try:
                with closing(self._job.open_queue()) as queue:
                    queue.heartbeat(self._claim, self._job.lease_seconds, self._shown)
            except LostClaim:
                self._lost.set()
                return
            except InputError:
                continue
