"""Exports a dataset, one file per shard, in parallel processes; each file is complete or absent.

OUT/export.json                          what it is made from and how, another export is refused; at its end the files' bytes
OUT/train/shard-000000.parquet ...       of DATA/train/shard-000000.tar ...
OUT/train-shard-000000.tar ...           or its audio
OUT/prepare.json                         of DATA, with the new files (Parquet only)
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from titan_tts.jobs.devices import codec_devices
from titan_tts.jobs.engines import open_engine
from titan_tts.jobs.run import Job, progress, run_jobs
from titan_tts.jobs.workspace import require_same, sweep, working_in
from titan_tts.share.contents import (
    PARQUET,
    STATE_NAME,
    figures,
    open_shards,
    read_state,
    shards_of,
)
from titan_tts.share.options import Options
from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable, write_atomic
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.codec.interface import WITHOUT_WEIGHTS
from torchtitan.models.dit_tts.speech.codec.record import (
    RECORD_NAME,
    check_codec,
    recorded_codecs,
)


def export_data(options: Options) -> str:
    """Writes what is missing. Returns a report."""
    out = Path(options.out).resolve()
    check_writable(out / STATE_NAME, "OUT")
    with working_in(out, out.with_name(f".{out.name}.lock"), "data export", "OUT"):
        return _export(options, out)


def _export(options: Options, out: Path) -> str:
    shards = shards_of(options.data)
    to_parquet, dataset = options.to == "parquet", open_shards(shards.values())
    state: dict[str, Any] = {"to": options.to, "data": dataset.fingerprint, "private": "left out"}
    settings, devices = vars(options) | {"codec": ""}, ["cpu"]
    if to_parquet:
        found = figures(options.data)
        if options.references == "drop":
            found["references"] = 0
        state |= {"references": options.references, "figures": found}
        files = {name: f"{name}{PARQUET}" for name in shards}
    else:
        devices = codec_devices(options.device, options.engine)
        codec = _codec_of(options, "cpu" if options.engine == "ray" else devices[0])
        settings["codec"] = codec.name
        state["figures"] = figures(options.data, codec.frames_per_second)
        state["audio"] = options.audio
        files = {name: f"{name.replace('/', '-')}.tar" for name in shards}
    complete = _begin(out, state)
    there = {file: (out / file).stat().st_size for file in files.values() if (out / file).exists()}
    counts = Counter(dataset.shard.tolist())
    samples = {name: counts[number] for number, name in enumerate(shards)}
    jobs = [
        Job(
            name,
            (shards[name], str(out / file), settings | {"split": os.path.dirname(name)}),
            samples[name],
        )
        for name, file in files.items()
        if file not in there or there[file] != complete.get(file, there[file])
    ]
    workers = options.workers or min(len(os.sched_getaffinity(0)), max(1, len(jobs)))
    left_out, function = set[str](), "titan_tts.share.export_shard:write_shard"
    with (
        open_engine(options.engine, max(workers, len(devices)), devices) as runner,
        progress("exporting", "sample", jobs, len(dataset) - sum(job.work for job in jobs)) as bar,
    ):
        for _, result in run_jobs(runner, function, jobs, bar, out):
            left_out.update(result["left_out"])
    sizes = {file: (out / file).stat().st_size for file in files.values()}
    if to_parquet:
        of_file = {files[name]: count for name, count in samples.items()}
        written = {file: {"bytes": sizes[file], "samples": of_file[file]} for file in sizes}
        _write_record(options, out, written)
    write_atomic(out / STATE_NAME, json.dumps(state | {"shards": sizes}, indent=1) + "\n")
    report = (
        f"{options.out} is complete: {len(sizes)} files, {sum(sizes.values()) / 1e9:.3f} GB, {len(dataset)} samples; "
        f"{len(jobs)} files written now"
    )
    if left_out:
        report += f"\nleft out of the samples' JSON as private: {', '.join(sorted(left_out))}"
    return report


def _codec_of(options: Options, device: str) -> Codec:
    """The codec that made the data, to decode them with."""
    records = recorded_codecs(options.data)
    name = options.codec
    if not name and records and records[0].kind in WITHOUT_WEIGHTS:
        name = records[0].kind
    if not name:
        kind = f", whose latents are {records[0].kind}'s" if records else ""
        raise InputError(
            f"{options.data}: no codec without weights is known for it{kind}; give the one that encoded it by --codec"
        )
    codec = build_codec(name, device)
    check_codec(codec, options.data)
    return codec


def _begin(out: Path, state: dict[str, Any]) -> dict[str, int]:
    """Makes the folder of a new export, or finds one of the same. Returns {file: bytes} of a complete one."""
    sweep(out)
    if not any(out.iterdir()):
        write_atomic(out / STATE_NAME, json.dumps(state, indent=1) + "\n")
    found = read_state(out)
    if found is None:
        raise InputError(f"OUT = {out} holds no export; give a new folder")
    complete = found.pop("shards", {})
    none = {"figures": 0}
    require_same(out, found | none, state | none, "give a new OUT, or remove this one")
    return complete


def _write_record(options: Options, out: Path, shards: dict[str, Any]) -> None:
    """The record of the data's preparation with the new files, by which a run finds the codec."""
    for found in recorded_codecs(options.data):
        record = read_json_file(found.path) | {"shards": shards}
        if options.references == "drop":
            record["settings"]["references"] = 0
        write_atomic(out / RECORD_NAME, json.dumps(record, indent=1) + "\n")
