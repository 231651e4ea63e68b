"""A corpus of recordings -> folders of training archives.

    prepare_corpus("LJSpeech-1.1", "data/ljspeech", PrepareSettings())

makes, in one step or not at all:

    data/ljspeech/
      prepare.json                  what it was made from, figures, shards with their SHA-256
      report.md                     the same for people
      train/shard-000000.tar ...    triplets, see data/shard_writer.py, each with its index
      heldout/shard-000000.tar ...

    list (plan.py) -> encode chunks (encode.py) -> choose references -> write shards (shards.py)

It can be killed at any moment and goes on where it was (work_folder.py). The shards' bytes depend on
the recordings and the settings, never on the number of workers, the engine or the kills.
"""

import hashlib
import json
import os
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.codec import Codec, build_codec, codec_kind
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.prepare import report, work_folder
from torchtitan.models.dit_tts.prepare.audio_reader import Loader
from torchtitan.models.dit_tts.prepare.chunk_file import chunk_path, read_digest, read_header
from torchtitan.models.dit_tts.prepare.encode import RUN_NAME, Run, digest_items
from torchtitan.models.dit_tts.prepare.executors import (
    ENGINES,
    Runner,
    codec_devices,
    default_workers,
    library_versions,
    open_engine,
)
from torchtitan.models.dit_tts.prepare.formats import FORMATS, Reader, open_corpus
from torchtitan.models.dit_tts.prepare.listing import (
    Plan,
    read_plan,
    source_digest,
    usable_items,
    write_plan,
)
from torchtitan.models.dit_tts.prepare.pack_shards import TABLE_NAME, shard_name
from torchtitan.models.dit_tts.prepare.recordings import SPLITS
from torchtitan.models.dit_tts.prepare.references import SampleTable, TableBuilder
from torchtitan.models.dit_tts.prepare.settings import PrepareSettings, difference


@dataclass(frozen=True)
class RunOptions:
    """How a preparation runs; nothing of it changes the output's bytes."""

    engine: str = "local"  # or "ray"
    workers: int = 0  # processes; 0: chosen from cores and work
    device: str = "auto"  # of the codec: auto, cpu, cuda, or a list with commas
    on_error: str = "raise"  # or "skip": damaged recordings are left out and counted
    max_corrupt_fraction: float = 0.01
    overwrite: bool = False


def prepare_corpus(
    source: str | Path,
    output: str | Path,
    settings: PrepareSettings = PrepareSettings(),
    options: RunOptions = RunOptions(),
) -> dict[str, Any]:
    """Prepare a corpus; returns the record that also stands in prepare.json.

    To the record comes "reused": True where the output was complete already and nothing was done.

    Raises:
        InputError: a mistake in the options or a damaged recording; an output that was made from
            something else and no --overwrite; another run at work. Work done is kept.
    """
    began = time.monotonic()
    # Through links: the work folder lies beside the output itself, and is renamed to it.
    source, output = str(source), Path(os.path.realpath(output))
    _check_options(settings, options)
    devices = codec_devices(options.device, options.engine)
    codec = build_codec(settings.codec, "cpu" if options.engine == "ray" else devices[0])
    reader = open_corpus(source, settings.format, settings.items)
    # Workers may have another current folder: the codec's name is one from any.
    settings = replace(settings, format=_format_name(reader), codec=codec.name)
    state = {
        "version": work_folder.RECORD_VERSION,
        "versions": library_versions(),
        # Which weights they are, not where they lie: moved ones are the same.
        "settings": settings.to_json()
        | {"codec": codec_kind(codec.name), "codec_fingerprint": codec.fingerprint},
        "source_digest": source_digest(reader),
    }
    # Before the lock, so that a complete output may lie where nothing can be written.
    record = _reusable(output, state, reader, codec, options)
    if record is not None:
        return record | {"reused": True}
    if os.path.ismount(output):
        raise InputError(
            f"{output}: is a mount point, which no finished folder can be renamed to; give a folder "
            "below it"
        )
    with work_folder.locked(output) as folder:
        try:
            finishing = work_folder.is_finishing(folder, state)
            if not finishing:
                work_folder.restore(folder, output)
            record = _reusable(output, state, reader, codec, options)
            if record is not None:  # by a run that ended in between, or was put back
                work_folder.leave(folder)
                return record | {"reused": True}
            replaces = work_folder.read_record(output)  # None, or --overwrite is given
            if not finishing:
                work_folder.begin(folder, state, options.overwrite)
                run = Run(
                    reader.root,
                    source,
                    options.on_error,
                    codec.latent_channels,
                    codec.sample_rate,
                    codec.hop_length,
                    settings,
                    uuid.uuid4().hex,
                )
                write_atomic(folder / RUN_NAME, json.dumps(run.to_json()))
                try:
                    _build(folder, reader, run, codec, state, options, devices, began)
                except InputError:
                    if read_plan(folder) is None:  # not even listed
                        work_folder.discard(folder)
                    raise
            record = work_folder.read_record(folder)
            work_folder.finish(folder, output, replaces)
        except OSError as error:
            raise InputError(work_folder.cannot_write(folder, error)) from None
    return record | {"reused": False}


def _format_name(reader: Reader) -> str:
    """The format that "auto" came to."""
    kind = f"{type(reader).__module__.rpartition('.')[2]}:{type(reader).__name__}"
    return next(name for name, (place, _) in FORMATS.items() if place == kind)


def _check_options(settings: PrepareSettings, options: RunOptions) -> None:
    settings.check()
    if options.engine not in ENGINES:
        raise InputError(f"--engine is '{options.engine}'; allowed are {', '.join(ENGINES)}")
    if options.on_error not in ("raise", "skip"):
        raise InputError(f"--on-error is '{options.on_error}'; allowed are raise, skip")
    if options.workers < 0:
        raise InputError(f"--workers is {options.workers}; it must be at least 1")
    if not 0 <= options.max_corrupt_fraction <= 1:
        raise InputError(
            f"--max-skipped-share is {options.max_corrupt_fraction}; it is a share between 0 and 1"
        )


def _reusable(
    output: Path, state: dict[str, Any], reader: Reader, codec: Codec, options: RunOptions
) -> dict[str, Any] | None:
    """The record of an output that is complete and up to date; None where it has to be made.

    Raises:
        InputError: the output is something else, and may not be replaced.
    """
    if work_folder.is_empty(output):
        return None
    record = work_folder.read_record(output)
    if record is None:
        raise InputError(
            f"{output}: exists and has no {work_folder.RECORD_NAME} of this command, so it is not "
            "replaced; give another output folder or remove this one"
        )
    if record.get("version") != work_folder.RECORD_VERSION:
        why = "was made by another version"
    elif changed := difference(record["settings"], state["settings"]):
        why = f"was made with other settings ({changed})"
    elif not work_folder.has_all_shards(output, record):
        why = "lacks shards that it had, or has changed ones"
    elif options.on_error == "raise" and "undecodable" in record["summary"]["dropped"]:
        why = "was made with --on-error skip and leaves damaged recordings out"
    elif (same := record["source_digest"] == state["source_digest"]) or _same_content(
        record, reader, codec, options
    ):
        with suppress(OSError):  # a complete output may lie where nothing can be written
            if not same:  # so that the next run need not compare the content
                record["source_digest"] = state["source_digest"]
                _write_record(output, record)
            work_folder.tidy(output)
        return record
    else:
        why = "was made from other recordings, or the source has changed since"
    if foreign := work_folder.foreign_name(output, record):
        raise InputError(
            f"{output}: {why}, and is not replaced as it holds {foreign}, which is none of it; move "
            "that away or give another output folder"
        )
    if options.overwrite:
        return None
    raise InputError(
        f"{output}: {why}; pass --overwrite to replace it once the new one is complete, or give "
        "another output folder"
    )


def _same_content(
    record: dict[str, Any], reader: Reader, codec: Codec, options: RunOptions
) -> bool:
    """Whether a source whose files' times changed, as a copy's do, still has the same content."""
    from tqdm import tqdm

    size = record["settings"]["chunk_items"]
    items = usable_items(reader, "", "skip", plan := Plan())
    progress = tqdm(items, "comparing with what was prepared", unit="recording", mininterval=1.0)
    loader, digests = Loader(reader.root), []
    while chunk := list(islice(progress, size)):
        digests.append(digest_items(chunk, loader, codec.latent_channels))
    loader.close()
    if options.on_error == "raise" and plan.problems:
        return False
    return _content_digest(digests) == record["content_digest"]


def _content_digest(chunk_digests: list[str]) -> str:
    return hashlib.sha256("".join(chunk_digests).encode()).hexdigest()


def _build(
    folder: Path,
    reader: Reader,
    run: Run,
    codec: Codec,
    state: dict[str, Any],
    options: RunOptions,
    devices: list[str],
    began: float,
) -> None:
    """All stages in the work folder, up to prepare.json."""
    plan = read_plan(folder)
    # A list that left recordings out is made again for who will have none left out.
    if plan is None or (plan.problems and options.on_error == "raise"):
        plan = write_plan(reader, run.source, options.on_error, folder, run.settings.chunk_items)
    missing, skipped = _missing_chunks(folder, plan, run, options)
    jobs = max(len(missing), -(-plan.items // run.settings.samples_per_shard))
    workers = options.workers or default_workers(jobs, devices)
    with open_engine(options.engine, workers, devices) as runner:
        encoded = _encode_stage(folder, plan, run, runner, missing, skipped)
        table, totals = _collect(folder, plan)
        if not len(table.in_split("train")):
            raise InputError(
                f"{run.source}: no training recording is left, left out were "
                f"{dict(totals['dropped'])}; change the filters"
            )
        table.save(folder / TABLE_NAME)
        work_folder.keep_shards_of(folder, totals["chunks_digest"])
        shards = _shard_stage(folder, table, run, runner)
    seconds = time.monotonic() - began
    record = {
        **state,
        "content_digest": _content_digest(totals["digests"]),
        "source_name": Path(run.source).name,
        "shards": shards,
        "summary": report.summarise(
            shards,
            codec.frames_per_second,
            totals["speakers"],
            table.own_crops(),
            totals["dropped"],
            totals["counts"],
            totals["problems"],
        ),
        "throughput": {
            "seconds": round(seconds, 2),
            "recordings_encoded": encoded,
            "recordings_a_second": round(encoded / seconds, 2),
            "workers": workers,
            "engine": options.engine,
            "devices": devices,
        },
    }
    write_atomic(folder / work_folder.REPORT_NAME, report.markdown(record, run.source))
    _write_record(folder, record)


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    write_atomic(folder / work_folder.RECORD_NAME, json.dumps(record, indent=1) + "\n")


class _Skipped:
    """Counts damaged recordings and ends the run where they are too many, or none is allowed."""

    def __init__(self, plan: Plan, run: Run, options: RunOptions):
        self.run, self.options = run, options
        self.count = 0
        self.total = plan.items + plan.dropped.get("undecodable", 0)
        self.add(plan.dropped.get("undecodable", 0), plan.problems)

    def add(self, count: int, problems: list[list[str]]) -> None:
        self.count += count
        if not count:
            return
        key, sentence = problems[-1]
        if self.options.on_error == "raise":
            raise InputError(
                f"{self.run.source}: {key}: {sentence}; an earlier run with --on-error skip left it "
                "out: go on with that, or start anew with --overwrite"
            )
        if self.count > self.options.max_corrupt_fraction * self.total:
            raise InputError(
                f"{self.run.source}: {self.count} of {self.total} recordings are damaged, more than "
                f"--max-skipped-share {self.options.max_corrupt_fraction} allows; the last is {key}: "
                f"{sentence}"
            )


def _missing_chunks(
    folder: Path, plan: Plan, run: Run, options: RunOptions
) -> tuple[list[int], _Skipped]:
    """Numbers of the chunks that are still to be encoded, and what the others skipped."""
    skipped = _Skipped(plan, run, options)
    missing = []
    for number in range(plan.chunks):
        path = chunk_path(folder, number)
        if path.exists():
            problems = read_header(path)[0].problems
            skipped.add(len(problems), problems)
        else:
            missing.append(number)
    return missing, skipped


def _encode_stage(
    folder: Path,
    plan: Plan,
    run: Run,
    runner: Runner,
    missing: list[int],
    skipped: _Skipped,
) -> int:
    """Encode the missing chunks; the number of recordings that were in them."""
    size = run.settings.chunk_items
    wanted = sum(min(size, plan.items - number * size) for number in missing)
    results = runner("encode:encode_chunk", [(str(folder), number) for number in missing])
    with _bar("encoding", plan.items, plan.items - wanted, "recording") as progress:
        for result in results:
            if "error" in result:
                raise InputError(result["error"])
            skipped.add(len(result["problems"]), result["problems"])
            progress.update(result["items"])
    return wanted


def _collect(folder: Path, plan: Plan) -> tuple[SampleTable, dict[str, Any]]:
    """The table over all chunks' samples, and what the chunks came to together."""
    builder = TableBuilder()
    dropped, counts = Counter(plan.dropped), Counter()
    problems, digests = list(plan.problems), []
    chunks_digest = hashlib.sha256()
    for number in range(plan.chunks):
        path = chunk_path(folder, number)
        header, data_offset = read_header(path)
        chunks_digest.update(read_digest(path))
        builder.add(header, data_offset)
        dropped.update(header.dropped)
        counts.update(header.counts)
        problems += header.problems
        digests.append(header.digest)
    table = builder.build()
    return table, {
        "dropped": dropped,
        "counts": counts,
        "problems": problems,
        "digests": digests,
        "chunks_digest": chunks_digest.hexdigest(),
        "speakers": len(builder.speakers),
    }


def _shard_stage(
    folder: Path, table: SampleTable, run: Run, runner: Runner
) -> dict[str, dict[str, Any]]:
    """Write the shards that are not there yet; {name: what is recorded of it} in order."""
    names = {}
    for split in SPLITS:
        count = -(-len(table.in_split(split)) // run.settings.samples_per_shard)
        names |= {shard_name(split, number): (split, number) for number in range(count)}
    jobs = [(str(folder), split, number) for split, number in names.values()]
    results = runner("pack_shards:build_shard", jobs)
    shards: dict[str, dict[str, Any]] = {}
    with _bar("writing shards", len(jobs), 0, "shard") as progress:
        for result in results:
            if "error" in result:
                raise InputError(result["error"])
            shards[result.pop("name")] = result
            progress.update()
    return {name: shards[name] for name in names}


def _bar(title: str, total: int, done: int, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(desc=title, total=total, initial=done, unit=unit, mininterval=1.0)
