"""`titan-tts collect`: from hours of long recordings to segments with texts and speakers."""

import os
import shlex
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from titan_tts.collect.settings import Settings
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.errors import check_range, require, require_modules, show
from torchtitan.models.dit_tts.factories import find_factory
from torchtitan.models.dit_tts.files import check_writable

if TYPE_CHECKING:
    from titan_tts.collect.queue import Queue
    from titan_tts.collect.worker import Job

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

    queue: str = ""
    """postgresql://USER:PASSWORD@HOST/DATABASE: machines that are given the same one and the same OUTPUT share the work;
    empty: a file in OUTPUT, for one machine."""

    lease_seconds: float = 60.0
    """A job whose worker is silent for longer goes to another."""

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
        check_range("--lease-seconds", self.lease_seconds, 1, 86_400)
        check_range("--attempts", self.attempts, 1, 1000)


def run(options: Options) -> int:
    options.check()
    require_modules("soundfile", "soxr", "av")
    if options.analyzer:
        find_factory(options.analyzer, "analyzer", "none")
    else:
        options.analysis.check_packages()
    from titan_tts.collect.folder import RECORD_NAME, locked, open_folder
    from titan_tts.collect.worker import Job
    from titan_tts.prepare.executors import library_versions

    output, alone = Path(os.path.realpath(options.output)), not options.queue
    check_writable(output / RECORD_NAME, "OUTPUT")
    with locked(output, alone):
        settings = asdict(options.analysis) | {"analyzer": options.analyzer}
        record = open_folder(output, settings, library_versions(), alone)
    limits = options.lease_seconds, options.attempts
    job = Job(str(output), options.queue, record["collection"], settings, *limits)
    with locked(output, alone) if alone else nullcontext(), closing(job.open_queue()) as queue:
        if alone:
            queue.fail_claims()  # of a run that was killed, maybe by one of these recordings
        _list(options, output, queue)
        _work(options, job, queue)
        return _report(output, queue)


def _list(options: Options, output: Path, queue: "Queue") -> None:
    """Brings the queue up to SOURCE."""
    from titan_tts.collect.folder import FILES, is_complete, locked, sweep, write_names
    from titan_tts.collect.sources import register

    sweep(output, queue)
    known = set(queue.jobs())
    listed = register(options.source, queue, output, options.prune)
    # Between them no other machine, whose recordings are others, may write its names.
    with locked(output, False) if options.queue else nullcontext():
        found = [(s.path not in listed, s.name, s.file) for s in queue.sources().values()]
        names = {file: name for _, name, file in sorted(found, reverse=True)}  # the last one stays
        write_names(output, names)
    done = names.keys() & queue.jobs("done").keys()
    queue.move([file for file in done if not is_complete(output, file)], "done")
    # Its last worker was taken for dead, and was only slow.
    queue.move([f for f in queue.jobs("dead") if is_complete(output, f)], "dead", "done")
    if options.retry_dead:
        queue.move(names, "dead")
    show(f"{counted(len(names), 'different recording')}, {len(names.keys() - known):,} of them new")
    gone = {path.name for path in (output / FILES).glob("*")} - names.keys()
    if gone:
        show(
            f"left out: {counted(len(gone), 'recording')} in {output / FILES} whose content no source has any more "
            f"({min(gone)} ...)"
        )


def _work(options: Options, job: "Job", queue: "Queue") -> None:
    """Until no job is left, here or on other machines."""
    from tqdm import tqdm

    from titan_tts.collect.folder import sweep
    from titan_tts.collect.run_workers import run_here
    from titan_tts.prepare.executors import codec_devices

    counts = queue.counts()
    jobs = counts["pending"] + counts["claimed"]
    if not jobs:
        return
    devices = codec_devices(options.device)
    most = min(_MAX_CPU_WORKERS, len(os.sched_getaffinity(0)))
    count = options.workers or (min(jobs, most) if devices == ["cpu"] else len(devices))
    (done, size, heard), began = queue.totals(), time.monotonic()
    # Of bytes, as nobody knows the hours of a recording before it is decoded. Smoothed, the rate would be that of the
    # second in which a recording was finished, and the time left 00:00.
    shown = {"desc": "collecting", "unit": "B", "unit_scale": True, "smoothing": 0}
    with tqdm(total=size, initial=done, **shown) as bar:

        def watch() -> None:
            done, _, seconds = queue.totals()
            speed = (seconds - heard) / (time.monotonic() - began)
            doing = [row.progress for row in queue.jobs("claimed").values() if row.progress]
            bar.update(done - bar.n)
            # Draws the bar, which an update by nothing does not.
            bar.set_postfix_str("; ".join([f"{speed:.1f} h of audio per h", *doing[:2]]))

        run_here(job, devices, count, queue, watch)
        watch()
    sweep(Path(job.output), queue)


def _report(output: Path, queue: "Queue") -> int:
    from titan_tts.collect.collection import COLLECTION_NAME, write_collection
    from titan_tts.collect.folder import FILES, is_complete, read_record
    from titan_tts.collect.report import REPORT_NAME, collection_page

    done = queue.jobs("done").keys() & read_record(output)["files"].keys()
    unseen = sum(not is_complete(output, file) for file in done)
    require(
        not unseen,
        f"{output / FILES}: {counted(unseen, 'folder')} that other machines have made cannot be seen here; check that all "
        "use the same OUTPUT, and start again when the file system shows them",
    )
    page = collection_page(output, write_collection(output), queue)
    page.write(output / REPORT_NAME)
    show(f"{page.text()}\n")
    show(f"report:        {output / REPORT_NAME}")
    show(f"correct it:    {shlex.join(['titan-tts', 'annotate', str(output)])}")
    manifest = str(output / COLLECTION_NAME)
    show(f"prepare it:    {shlex.join(['titan-tts', 'prepare', manifest, 'DATA'])}")
    return int(page.cards["failed"] != "0")
