"""`titan-tts collect`: from hours of long recordings to segments with texts and speakers."""

import json
import os
import shlex
import shutil
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from titan_tts.collect.settings import Settings
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.errors import check_range, require, require_modules, show
from torchtitan.models.dit_tts.factories import find_factory
from torchtitan.models.dit_tts.files import check_writable

if TYPE_CHECKING:
    from titan_tts.collect.queue import Queue

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
    """A recording that fails so many times is left out and listed."""

    retry_dead: bool = False
    """Try the recordings again that were left out as they failed."""

    prune: bool = False
    """Leave out recordings that SOURCE does not name, such as deleted ones and those of an earlier SOURCE."""

    def check(self) -> None:
        """Raises InputError where a number is out of its range."""
        self.analysis.check()
        check_range("--workers", self.workers, 0, 1024)
        check_range("--attempts", self.attempts, 1, 1000)


def run(options: Options) -> int:
    options.check()
    require_modules("soundfile", "soxr", "av")
    if options.analyzer:
        find_factory(options.analyzer, "analyzer", "none")
    else:
        options.analysis.check_packages()
    from titan_tts.collect.folder import RECORD_NAME, open_folder
    from titan_tts.collect.queue import Queue
    from titan_tts.jobs.devices import library_versions
    from titan_tts.jobs.workspace import working_in

    output = Path(os.path.realpath(options.output))
    check_writable(output / RECORD_NAME, "OUTPUT")
    with working_in(output, output / ".collect.lock", "collect", "OUTPUT"):
        settings = asdict(options.analysis) | {"analyzer": options.analyzer}
        open_folder(output, settings, library_versions())
        queue = Queue(output, options.attempts)
        _list(options, output, queue)
        _work(options, output, queue, settings)
        return _report(output, queue)


def _list(options: Options, output: Path, queue: "Queue") -> None:
    """Brings the queue up to SOURCE."""
    from titan_tts.collect.folder import FILES, write_names
    from titan_tts.collect.sources import register

    known = set(queue.jobs())
    listed = register(options.source, queue, output, options.prune)
    found = [(s.path not in listed, s.name, s.file) for s in queue.sources().values()]
    names = {file: name for _, name, file in sorted(found, reverse=True)}  # the last one stays
    write_names(output, names)
    if options.retry_dead:
        queue.forget_failures()
    show(f"{counted(len(names), 'different recording')}, {len(names.keys() - known):,} of them new")
    gone = {path.name for path in (output / FILES).glob("*")} - names.keys()
    if gone:
        show(
            f"left out: {counted(len(gone), 'recording')} in {output / FILES} whose content no source has any more "
            f"({min(gone)} ...)"
        )


def _work(options: Options, output: Path, queue: "Queue", settings: dict[str, Any]) -> None:
    """Until no job is left."""
    from titan_tts.collect.folder import PARTIAL, is_complete
    from titan_tts.jobs.devices import codec_devices
    from titan_tts.jobs.engines import open_engine
    from titan_tts.jobs.run import Job, progress, run_jobs

    shutil.rmtree(output / PARTIAL, ignore_errors=True)  # of killed workers
    rows, of_file = queue.jobs(), defaultdict[str, list[tuple]](list)
    for source in queue.sources().values():
        of_file[source.file].append(tuple(source))
    given = json.dumps(settings)
    sizes: dict[str, int] = {file: each[0][2] for file, each in of_file.items()}
    jobs = [
        Job(each[0][1], (str(output), file, each, given), sizes[file], rows[file].attempts)
        for file, each in of_file.items()
        if rows[file].state == "pending"
    ]
    # What was never tried comes first, of that the longest: the shortest fill the gaps at the end.
    jobs.sort(key=lambda job: (job.tried, -job.work, job.values[1]))
    if not jobs:
        return
    devices = codec_devices(options.device, options.engine)
    most = min(_MAX_CPU_WORKERS, len(os.sched_getaffinity(0)))
    count = options.workers or (min(len(jobs), most) if devices == ["cpu"] else len(devices))
    done, began, heard = sum(sizes.values()) - sum(job.work for job in jobs), time.monotonic(), 0.0
    function = "titan_tts.collect.worker:collect_recording"

    def failed(job: Job, reason: str) -> None:
        queue.fail(job.values[1], job.tried, reason)

    # In bytes, as nobody knows the hours of a recording before it is decoded.
    with (
        open_engine(options.engine, count, devices, here=False) as runner,
        progress("collecting", "B", jobs, done, unit_scale=True) as bar,
    ):
        for job, made in run_jobs(runner, function, jobs, bar, output, failed, options.attempts):
            require(
                is_complete(output, job.values[1]),
                f"{output}: what a worker has made of {job.name} cannot be seen here; check that all machines have the same "
                "OUTPUT, and start again when the file system shows it",
            )
            queue.done(job.values[1], **made)
            heard += made["seconds"]
            bar.set_postfix_str(f"{heard / (time.monotonic() - began):.1f} h of audio per h")
    shutil.rmtree(output / PARTIAL, ignore_errors=True)


def _report(output: Path, queue: "Queue") -> int:
    from titan_tts.collect.collection import COLLECTION_NAME, write_collection
    from titan_tts.collect.report import REPORT_NAME, collection_page

    page = collection_page(output, write_collection(output), queue)
    page.write(output / REPORT_NAME)
    show(f"{page.text()}\n")
    show(f"report:        {output / REPORT_NAME}")
    show(f"correct it:    {shlex.join(['titan-tts', 'annotate', str(output)])}")
    manifest = str(output / COLLECTION_NAME)
    show(f"prepare it:    {shlex.join(['titan-tts', 'prepare', manifest, 'DATA'])}")
    return int(page.cards["failed"] != "0")
