"""`titan-tts collect`: from hours of long recordings to segments with texts and speakers."""

import json
import os
import shlex
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from titan_tts.collect.settings import Settings
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.errors import check_range, require, require_modules, show
from torchtitan.models.dit_tts.factories import find_factory
from torchtitan.models.dit_tts.files import check_writable

if TYPE_CHECKING:
    from titan_tts.collect.ledger import Ledger, Source

_MAX_CPU_WORKERS = 4  # by default: each has models of its own in memory


@dataclass(frozen=True)
class Options:
    """Cut long recordings into segments, transcribe and measure them, and find out who speaks.

    It may be stopped at any time; the same command goes on, and adds recordings that are new.
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """Recordings: a folder, a glob, a text file of paths, or the URL of a bucket."""

    output: Annotated[Positional[str], arg(metavar="OUTPUT")]
    """Folder for the segments; collection.jsonl in it is what `titan-tts prepare` reads."""

    analysis: Settings = Settings()

    analyzer: str = ""
    """Your own analysis in place of all of it: package.module:factory."""

    device: str = "auto"
    """Device of the models: auto, cpu, cuda, or a list such as cuda:0,cuda:1."""

    workers: int = 0
    """Processes, each with models of its own; 0: one per GPU, or at most 4 on a CPU."""

    engine: Literal["local", "ray"] = "local"
    """What runs the processes: this machine, or a Ray cluster whose nodes see SOURCE and OUTPUT under the same paths."""

    attempts: int = 3
    """A recording that fails so many times is left out and listed; with more it is tried again."""

    prune: bool = False
    """Leave out recordings that SOURCE does not name, such as deleted ones and those of an earlier SOURCE."""


def run(options: Options) -> int:
    options.analysis.check()
    check_range("--workers", options.workers, 0, 1024)
    check_range("--attempts", options.attempts, 1, 1000)
    require_modules("soundfile", "soxr", "av")
    if options.analyzer:
        find_factory(options.analyzer, "analyzer", "none")
    else:
        options.analysis.check_packages()
    from titan_tts.collect.folder import RECORD_NAME, open_folder
    from titan_tts.collect.ledger import Ledger
    from titan_tts.jobs.devices import library_versions
    from titan_tts.jobs.workspace import working_in

    output = Path(os.path.realpath(options.output))
    check_writable(output / RECORD_NAME, "OUTPUT")
    with working_in(output, output / ".collect.lock", "collect", "OUTPUT"):
        settings = asdict(options.analysis) | {"analyzer": options.analyzer}
        open_folder(output, settings, library_versions())
        ledger = Ledger(output, options.attempts)
        sources = _list(options, output, ledger)
        _work(options, output, ledger, sources, json.dumps(settings))
        return _report(output, ledger)


def _list(options: Options, output: Path, ledger: "Ledger") -> dict[str, "Source"]:
    """Brings the ledger up to SOURCE. Returns {FILE_ID: a source with that content}."""
    from titan_tts.collect.folder import FILES, write_names
    from titan_tts.collect.sources import register

    known = ledger.jobs().keys()
    listed = register(options.source, ledger, output, options.prune)
    found = sorted(ledger.sources().values(), key=lambda each: (each.path not in listed, each.name))
    sources = {source.file: source for source in reversed(found)}  # the last one stays
    write_names(output, {file: source.name for file, source in sources.items()})
    new = len(sources.keys() - known)
    show(f"{counted(len(sources), 'different recording')}, {new:,} of them new")
    if gone := {path.name for path in (output / FILES).glob("*")} - sources.keys():
        count = counted(len(gone), "recording")
        show(f"left out: {count} in {output / FILES} whose content no source has ({min(gone)} ...)")
    return sources


def _work(
    options: Options, output: Path, ledger: "Ledger", sources: dict[str, "Source"], settings: str
) -> None:
    """Does the jobs until none is left. `settings`: see `worker.collect_recording`."""
    from titan_tts.collect.folder import PARTIAL, is_complete
    from titan_tts.collect.ledger import Source
    from titan_tts.jobs.devices import codec_devices
    from titan_tts.jobs.engines import open_engine
    from titan_tts.jobs.run import Job, progress, run_jobs

    shutil.rmtree(output / PARTIAL, ignore_errors=True)  # of killed workers
    jobs = [
        Job(source.name, (str(output), tuple(source), settings), source.size, row.attempts)
        for file, row in ledger.jobs().items()
        if row.state == "pending" and (source := sources[file])
    ]
    # What was never tried comes first, of that the longest: the shortest fill the gaps at the end.
    jobs.sort(key=lambda job: (job.tried, -job.work))
    if not jobs:
        return
    devices = codec_devices(options.device, options.engine)
    most = min(_MAX_CPU_WORKERS, len(os.sched_getaffinity(0)))
    count = options.workers or (min(len(jobs), most) if devices == ["cpu"] else len(devices))
    done = sum(source.size for source in sources.values()) - sum(job.work for job in jobs)
    began, heard, function = time.monotonic(), 0.0, "titan_tts.collect.worker:collect_recording"

    def failed(job: Job, reason: str) -> None:
        ledger.fail(Source(*job.values[1]).file, job.tried, reason)

    # In bytes, as nobody knows the hours of a recording before it is decoded.
    with (
        open_engine(options.engine, count, devices, here=False) as runner,
        progress("collecting", "B", jobs, done, unit_scale=True) as bar,
    ):
        for job, made in run_jobs(runner, function, jobs, bar, output, failed, options.attempts):
            require(
                is_complete(output, Source(*job.values[1]).file),
                f"{output}: what was made of {job.name} cannot be seen here; check that all machines have the same OUTPUT",
            )
            heard += made["seconds"]
            bar.set_postfix_str(f"{heard / (time.monotonic() - began):.1f} h of audio per h")
    shutil.rmtree(output / PARTIAL, ignore_errors=True)


def _report(output: Path, ledger: "Ledger") -> int:
    from titan_tts.collect.collection import COLLECTION_NAME, write_collection
    from titan_tts.collect.report import REPORT_NAME, collection_page

    page = collection_page(output, write_collection(output), ledger)
    page.write(output / REPORT_NAME)
    show(f"{page.text()}\n")
    show(f"report:        {output / REPORT_NAME}")
    show(f"correct it:    {shlex.join(['titan-tts', 'annotate', str(output)])}")
    manifest = str(output / COLLECTION_NAME)
    show(f"prepare it:    {shlex.join(['titan-tts', 'prepare', manifest, 'DATA'])}")
    return int(page.cards["failed"] != "0")
