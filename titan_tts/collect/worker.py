"""One job of a collection: a recording is decoded and analyzed, and its folder made.

It may be killed at any moment: a folder appears complete or not at all, and of two that are made of one content both
are the same.
"""

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.collect.folder import (
    MAX_SECONDS,
    PARTIAL,
    check_embeddings,
    is_complete,
    write_recording,
)
from titan_tts.collect.queue import Source
from titan_tts.collect.sources import local_copy
from titan_tts.jobs.engines import JobError
from torchtitan.models.dit_tts.errors import InputError, first_line, require
from torchtitan.models.dit_tts.factories import call_factory
from torchtitan.models.dit_tts.speech.audio import decode


@lru_cache(maxsize=1)
def _analyzer(settings: str, device: str) -> Any:
    """A process's `analyze.Analyzer`, or what --analyzer makes in its place: its models are loaded once."""
    values = json.loads(settings)
    if spec := values.pop("analyzer"):
        protocol = "titan_tts/collect/analyze.py"
        return call_factory(spec, device, "analyzer", "none", ["analyze"], protocol)
    from titan_tts.collect.analyze import Analyzer
    from titan_tts.collect.settings import Settings

    return Analyzer(Settings(**values), device)


class _Stopwatch:
    """Adds up the seconds of each stage in `stages`."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._last = time.monotonic()

    def progress(self, stage: str, seconds: float) -> None:
        now = time.monotonic()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now


@contextmanager
def _no_fault_of_the_recording() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise JobError(f"{kind}{first_line(error)}") from error


def collect_recording(
    output: str, file: str, sources: list[tuple], settings: str, device: str
) -> dict[str, Any]:
    """Makes files/FILE_ID unless it is there. Returns {"seconds": of audio, "stages": {name: seconds}}. Called by name in
    processes of every engine.

    Args:
        sources: values of each `Source` with this content.
        settings: JSON of the analysis's settings and "analyzer".
    """
    folder = Path(output)
    if is_complete(folder, file):
        return {"seconds": 0.0, "stages": {}}
    with _no_fault_of_the_recording():
        analyzer = _analyzer(settings, device)
    watch, partial = _Stopwatch(), folder / PARTIAL / f"{file}.{uuid.uuid4().hex}"
    try:
        samples, rate = _decoded(sources, partial)
        seconds = len(samples) / rate
        hours = f"{seconds / 3600:.1f} hours"
        require(seconds <= MAX_SECONDS, f"has {hours}, but 27 are the most; cut it")
        watch.progress("decoding", seconds)
        with _no_fault_of_the_recording():
            segments = analyzer.analyze(samples, rate, watch.progress)
            check_embeddings(segments)
        watch.progress("figures", seconds)
        write_recording(folder, file, partial, segments, seconds, rate)
        watch.progress("writing", seconds)
        return {"seconds": seconds, "stages": watch.stages}
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _decoded(sources: list[tuple], partial: Path) -> tuple[np.ndarray, int]:
    """((n, channels) float32, rate) of the first source that still has its content."""
    problem = InputError("no file of SOURCE has this content any more")
    for source in sources:
        try:
            with local_copy(Source(*source), partial) as path:
                return decode(path)
        except InputError as error:
            problem = error
    raise problem
