"""A corpus of recordings -> folders of training shards.

    prepare_corpus(Options("LJSpeech-1.1", "data/ljspeech"))

makes, all at once at the end:

    data/ljspeech/
      prepare.json                  what it was made from, figures, shards with their SHA-256
      train/shard-000000.tar ...    triplets, see data/shard_writer.py, each with its index
      heldout/shard-000000.tar ...

    list (listing.py) -> encode chunks (encode.py) -> choose references, write shards (pack_shards.py)

It can be killed at any moment and continues where it was (work_folder.py). The shards' bytes depend on
the recordings and the settings, never on the number of workers, the engine or the kills.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_tts.jobs.engines import (
    Runner,
    codec_devices,
    default_workers,
    library_versions,
    open_engine,
)
from titan_tts.jobs.run import Job, progress, run_jobs
from titan_tts.jobs.workspace import difference
from titan_tts.prepare import work_folder
from titan_tts.prepare.captions import thirds
from titan_tts.prepare.encode import Chunk, Run, open_chunks, read_chunk, write_run
from titan_tts.prepare.formats import Reader, find_format, open_corpus
from titan_tts.prepare.listing import (
    SHOWN_PROBLEMS,
    Plan,
    add_names,
    read_plan,
    source_digest,
    write_plan,
)
from titan_tts.prepare.pack_shards import shard_name
from titan_tts.prepare.processing import REASONS
from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import HELDOUT, SPLITS, TRAIN
from torchtitan.models.dit_tts.config.codec_name import from_any_folder
from torchtitan.models.dit_tts.data.left_out import left_out_words
from torchtitan.models.dit_tts.errors import InputError, require, show, without_secrets
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.speech.codec import build_codec, codec_kind


def prepare_corpus(options: Options) -> dict[str, Any]:
    """Prepare a corpus; returns the record that prepare.json holds.

    The record gets "reused": True where the output was complete already and nothing was done.
    """
    options.check()
    # Through links: the work folder lies next to the output itself, and is renamed to it.
    output = Path(os.path.realpath(options.output))
    devices = codec_devices(options.device, options.engine)
    codec = build_codec(options.codec, "cpu" if options.engine == "ray" else devices[0])
    # Workers may have another current folder.
    name, layout = from_any_folder(options.codec), find_format(options.source, options.format)
    options = replace(options, format=layout, codec=name)
    reader = open_corpus(options)
    show(
        f"preparing {without_secrets(options.source)} ({options.format}) with codec {codec.name}: "
        f"{codec.sample_rate} Hz, {codec.frames_per_second:g} latent frames per second"
    )
    state = {
        "version": work_folder.RECORD_VERSION,
        "versions": library_versions() | {"work folder": work_folder.WORK_VERSION},
        # Which weights they are, not where they lie: moved ones are the same.
        "settings": options.of_shards()
        | {"codec": codec_kind(codec.name), "codec_fingerprint": codec.fingerprint},
        "source_digest": source_digest(reader),
    }
    with work_folder.working_in_partial(output) as folder:
        if record := _reusable(output, state, reader):
            work_folder.remove_scratch(output)  # which a kill has left
            return record | {"reused": True}
        work_folder.begin(folder, state)
        shape = codec.latent_channels, codec.sample_rate, codec.hop_length
        run = Run(reader.root, reader.files(), *shape, options)
        write_run(folder, run)
        try:
            record = _build(folder, reader, run, state, devices)
        except InputError:
            if read_plan(folder) is None:  # not even listed
                work_folder.remove_scratch(folder)
            raise
        work_folder.finish(folder, output)
    return record | {"reused": False}


def _reusable(output: Path, state: dict[str, Any], reader: Reader) -> dict[str, Any] | None:
    """The record of an output that is complete and up to date; None where there is no output."""
    if work_folder.is_empty(output):
        return None
    record = work_folder.read_record(output)
    if record is None:
        why = f"exists and has no {work_folder.RECORD_NAME} of this command, so it is not replaced"
    elif record["version"] != work_folder.RECORD_VERSION:
        why = "was made by another version"
    elif changed := difference(record["settings"], state["settings"]):
        why = f"was made with other settings ({changed})"
    elif not work_folder.has_all_shards(output, record):
        why = "lacks shards that it had, or has changed ones"
    elif record["source_digest"] != state["source_digest"]:
        made = (output / work_folder.RECORD_NAME).stat().st_mtime
        lists = [path for path in reader.files().values() if os.path.isfile(path)]
        newer = [f" ({path} is newer)" for path in lists if os.path.getmtime(path) > made]
        why = (
            f"was made from other recordings or texts, or the source's files have changed since{''.join(newer[:1])}; "
            "corrected texts, too, need a new folder, of finetune a new OUT"
        )
    else:
        return record
    raise InputError(f"{output}: {why}; give another output folder, or remove this one")


def _build(
    folder: Path, reader: Reader, run: Run, state: dict[str, Any], devices: list[str]
) -> dict[str, Any]:
    """All stages in the work folder, up to prepare.json, whose content it returns."""
    options = run.options
    plan = read_plan(folder) or write_plan(reader, options, folder)
    counted, missing = _so_far(folder, plan)
    _check_corrupt(options, plan, counted)
    jobs = max(len(missing), -(-plan.items // options.samples_per_shard))
    workers = options.workers or default_workers(jobs, devices, options.engine)
    with open_engine(options.engine, workers, devices) as runner:
        encoded = _encode_stage(folder, plan, options, runner, missing, counted)
        total, missing = _so_far(folder, plan)  # in the list's order, whatever came first
        wanted = TRAIN if plan.train_items else HELDOUT
        require(
            bool(missing or total.samples.get(wanted)),
            f"{options.source}: no recording is left for {wanted}, left out were {total.dropped}; change the filters",
        )
        chunks = open_chunks(folder, run.channels)
        require(
            not missing and len(chunks) == sum(total.samples.values()),
            f"{folder}: not all of its encoded chunks can be seen; start again, or remove it first",
        )
        shards = _shard_stage(folder, total, options, runner)
    frames_per_second = run.sample_rate / run.hop_length
    speakers = len(chunks.labels("speaker")[1])
    record = {
        **state,
        "sample_rate": run.sample_rate,
        "frames_per_second": frames_per_second,
        "shards": shards,
        "summary": summarize(shards, frames_per_second, speakers, total),
        "encoded_now": encoded,
    }
    write_atomic(folder / work_folder.RECORD_NAME, json.dumps(record, indent=1) + "\n")
    return record


def _check_corrupt(options: Options, plan: Plan, counted: Chunk) -> None:
    """Raises InputError where too many of the recordings seen so far are corrupt."""
    count = counted.dropped.get("undecodable", 0)
    total = plan.items + plan.dropped.get("undecodable", 0)
    if count > options.max_corrupt_fraction * total:
        key, sentence = counted.problems[-1]
        enough = min(1.0, (100 * count // total + 1) / 100)
        raise InputError(
            f"{options.source}: {count} of {total} recordings are corrupt or missing, more than --max-corrupt-fraction = "
            f"{options.max_corrupt_fraction} allows (give {enough:g} or more, or correct them); the last is "
            f"{key}: {sentence}"
        )


def _encode_stage(
    folder: Path, plan: Plan, options: Options, runner: Runner, missing: list[int], counted: Chunk
) -> int:
    """Encode the missing chunks, and add them to `counted`; the number of recordings in them."""
    size = options.chunk_items
    jobs = [
        Job(f"chunk {number}", (str(folder), number), min(size, plan.items - number * size))
        for number in missing
    ]
    wanted = sum(int(job.work) for job in jobs)
    with progress("encoding", "recording", jobs, plan.items - wanted) as bar:
        function = "titan_tts.prepare.encode:encode_chunk"
        for _, result in run_jobs(runner, function, jobs, bar, folder):
            counted.add(Chunk(**result["chunk"]))
            _check_corrupt(options, plan, counted)
    return wanted


def _so_far(folder: Path, plan: Plan) -> tuple[Chunk, list[int]]:
    """The counts of the list and its encoded chunks, and the numbers of the missing chunks."""
    counted, missing = Chunk(dropped=dict(plan.dropped), problems=list(plan.problems)), []
    add_names(counted.dropped_names, plan.dropped_names)
    for number in range(plan.chunks):
        chunk = read_chunk(folder, number)
        if chunk is None:
            missing.append(number)
        else:
            counted.add(chunk)
    return counted, missing


def _shard_stage(
    folder: Path, total: Chunk, options: Options, runner: Runner
) -> dict[str, dict[str, Any]]:
    """Write the shards that are not there yet; {name: its entry in the record} in order."""
    relative_to = json.dumps(thirds(total.measured))
    jobs = [
        Job(shard_name(split, number), (str(folder), split, number, relative_to))
        for split in SPLITS
        for number in range(-(-total.samples.get(split, 0) // options.samples_per_shard))
    ]
    with progress("writing shards", "shard", jobs) as bar:
        function = "titan_tts.prepare.pack_shards:build_shard"
        shards = {job: result for job, result in run_jobs(runner, function, jobs, bar, folder)}
    return {job.name: shards[job] for job in jobs}


def summarize(
    shards: dict[str, dict[str, Any]], frames_per_second: float, speakers: int, total: Chunk
) -> dict[str, Any]:
    """The figures of a preparation; the same whatever workers, kills and engine."""
    summary: dict[str, Any] = {}
    for split in SPLITS:
        parts = [shard for name, shard in shards.items() if name.startswith(f"{split}/")]
        sums = {
            name: sum(shard[name] for shard in parts)
            for name in ("samples", "frames", "without_reference")
        }
        hours = round(sums["frames"] / frames_per_second / 3600, 4)
        summary[split] = {**sums, "hours": hours, "shards": len(parts)}
    seconds = {name: round(each, 1) for name, each in sorted(total.dropped_seconds.items())}
    return summary | {
        "speakers": speakers,
        "dropped": dict(sorted(total.dropped.items())),
        "dropped_seconds": seconds,
        "dropped_names": total.dropped_names,
        "problems": total.problems[:SHOWN_PROBLEMS],
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary in words."""
    out = []
    for split in SPLITS:
        part = summary[split]
        if part["samples"]:
            hours = part["hours"]
            length = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
            out.append(f"{split}: samples {part['samples']}, {length}, shards {part['shards']}")
        if count := part["without_reference"]:
            why = "as --references is 0 or their speaker has no other recording"
            out.append(
                f"{split} samples without a reference, {why}: {count} ({count / part['samples']:.1%})"
            )
    out.append(f"speakers: {summary['speakers']}")
    samples = sum(summary[split]["samples"] for split in SPLITS)
    if total := sum(summary["dropped"].values()):
        seconds = summary.get("dropped_seconds", {})  # not in records of earlier versions
        lost = sum(seconds.values())
        everything = lost + 3600 * sum(summary[split]["hours"] for split in SPLITS)
        out.append(left_out_words("recordings", (total, samples + total), (lost, everything), ()))
        for name, count in summary["dropped"].items():
            minutes = f", {seconds[name] / 60:.1f} minutes" if seconds.get(name) else ""
            names = summary.get("dropped_names", {}).get(name, [])
            shown = f": {', '.join(names)}{', ...' if count > len(names) else ''}" if names else ""
            out.append(without_secrets(f"  {name}: {count}{minutes} ({REASONS[name]}){shown}"))
        if too_long := seconds.get("too_long"):
            out.append(
                f"  {too_long / everything:.0%} of the speech is too long: cut it at pauses, each part with its own text "
                "(titan-tts collect cuts and writes down, by a recognizer)"
            )
    if summary["problems"]:
        out.append("the first undecodable recordings:")
        out += [without_secrets(f"  {key}: {sentence}") for key, sentence in summary["problems"]]
    return out
