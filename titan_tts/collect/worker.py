"""One job of a collection: a recording is decoded and analyzed, and its folder made.

It may be killed at any moment: a folder appears complete or not at all, and of two that are made of one content both
are the same.
"""

import json
import shutil
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

from titan_tts.collect.folder import MAX_SECONDS, PARTIAL, is_complete, write_recording
from titan_tts.collect.sources import Source, local_copy
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


def collect_recording(output: str, source: tuple, settings: str, device: str) -> dict[str, Any]:
    """Makes files/FILE_ID of a recording unless it is there. Called by name in processes of every engine.

    Args:
        source: values of a `Source`.
        settings: JSON of the analysis's settings and "analyzer".
    """
    folder, given = Path(output), Source(*source)
    if is_complete(folder, given.file):
        return {}
    partial = folder / PARTIAL / f"{given.file}.{uuid.uuid4().hex}"
    try:
        with local_copy(given, partial) as path:
            samples, rate = decode(path, longest=MAX_SECONDS)
        seconds = len(samples) / rate
        hours = f"{seconds / 3600:.1f} hours"
        require(seconds <= MAX_SECONDS, f"has {hours}, but 27 are the most; cut it")
        try:
            segments = _analyzer(settings, device).analyze(samples, rate)
        except Exception as error:  # no fault of the recording
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            raise JobError(f"{kind}{first_line(error)}") from error
        write_recording(folder, given.file, partial, segments, seconds, rate)
        return {}
    finally:
        shutil.rmtree(partial, ignore_errors=True)
