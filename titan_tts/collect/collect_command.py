"""`titan-tts collect`: from hours of long recordings to segments with texts and speakers."""

import json
import os
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from titan_tts.collect.settings import Settings
from titan_tts.jobs.workspace import WorkerOptions
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.errors import check_range, require_modules, show
from torchtitan.models.dit_tts.factories import find_factory
from torchtitan.models.dit_tts.files import check_writable

if TYPE_CHECKING:
    from titan_tts.collect.sources import Source

_MAX_CPU_WORKERS = 4  # by default: each has models of its own in memory


@dataclass(frozen=True)
class Options(WorkerOptions):
    """Cut long recordings into segments, transcribe and measure them, and find out who speaks.

    It may be stopped at any time; the same command goes on, adds recordings that are new, and tries again what failed.
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """Recordings: a folder, a glob, a text file of paths, or the URL of a bucket."""

    output: Annotated[Positional[str], arg(metavar="OUTPUT")]
    """Folder for the segments; collection.jsonl in it is what `titan-tts prepare` reads."""

    analysis: Settings = Settings()

    analyzer: str = ""
    """Your own analysis in place of all of it: package.module:factory."""

    prune: bool = False
    """Leave out recordings that SOURCE does not name, such as deleted ones and those of an earlier SOURCE."""


def run(options: Options) -> int:
    options.analysis.check()
    check_range("--workers", options.workers, 0, 1024)
    require_modules("soundfile", "soxr", "av")
    if options.analyzer:
        find_factory(options.analyzer, "analyzer", "none")
    else:
        options.analysis.check_packages()
    from titan_tts.collect.folder import RECORD_NAME, open_folder, write_names
    from titan_tts.collect.sources import register
    from titan_tts.jobs.workspace import working_in

    output = Path(os.path.realpath(options.output))
    check_writable(output / RECORD_NAME, "OUTPUT")
    with working_in(output, output / ".collect.lock", "collect", "OUTPUT"):
        settings = asdict(options.analysis) | {"analyzer": options.analyzer}
        open_folder(output, settings)
        sources = register(options.source, output, options.prune)
        write_names(output, {file: source.name for file, source in sources.items()})
        return _report(output, _work(options, output, sources, json.dumps(settings)))


def _work(
    options: Options, output: Path, sources: dict[str, "Source"], settings: str
) -> dict[str, str]:
    """Collects what is not there yet. Returns {name: reason} of what has failed.

    Args:
        sources: {FILE_ID: source}
        settings: see `worker.collect_recording`.
    """
    from titan_tts.collect.folder import PARTIAL, is_complete
    from titan_tts.jobs.engines import codec_devices, cores, open_engine
    from titan_tts.jobs.run import Job, progress, run_jobs

    shutil.rmtree(output / PARTIAL, ignore_errors=True)  # of killed workers
    jobs = [
        Job(source.name, (str(output), tuple(source), settings), source.size)
        for file, source in sources.items()
        if not is_complete(output, file)
    ]
    show(f"{counted(len(sources), 'different recording')}, {len(jobs):,} of them new")
    if not jobs:
        return {}
    if not options.analyzer:
        options.analysis.check_models()  # once, not in each worker
    jobs.sort(key=lambda job: -job.work)  # the shortest fill the gaps at the end
    devices = codec_devices(options.device, options.engine)
    most = min(_MAX_CPU_WORKERS, cores())
    count = options.workers or (min(len(jobs), most) if devices == ["cpu"] else len(devices))
    done = sum(source.size for source in sources.values()) - sum(job.work for job in jobs)
    function, failures = "titan_tts.collect.worker:collect_recording", dict[str, str]()

    def failed(job: Job, reason: str) -> None:
        failures[job.name] = reason

    # In bytes, as nobody knows the hours of a recording before it is decoded.
    with (
        open_engine(options.engine, count, devices, here=False) as runner,
        progress("collecting", "B", jobs, done, unit_scale=True) as bar,
    ):
        for job, _ in run_jobs(runner, function, jobs, bar, output, failed):
            failures.pop(job.name, None)
    shutil.rmtree(output / PARTIAL, ignore_errors=True)
    return failures


def _report(output: Path, failures: dict[str, str]) -> int:
    from titan_tts.collect.collection import (
        COLLECTION_NAME,
        REPORT_NAME,
        collection_page,
        write_collection,
    )

    page = collection_page(output, write_collection(output), failures)
    page.write(output / REPORT_NAME)
    show(f"{page.text()}\n")
    show(f"report:        {output / REPORT_NAME}")
    show(f"correct it:    {shlex.join(['titan-tts', 'annotate', str(output)])}")
    manifest = str(output / COLLECTION_NAME)
    show(f"prepare it:    {shlex.join(['titan-tts', 'prepare', manifest, 'DATA'])}")
    return int(bool(failures))
