"""Exports a dataset, one file per shard, in parallel processes; each file is complete or absent.

OUT/export.json                          what it is made from and how; another export is refused
OUT/train/shard-000000.parquet ...       of DATA/train/shard-000000.tar ...
OUT/train-shard-000000.tar ...           or its audio
OUT/README.md                            the card, once all is there; one that is there stays
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.jobs.devices import codec_devices, cores
from titan_tts.jobs.engines import open_engine
from titan_tts.jobs.run import Job, progress, run_jobs
from titan_tts.jobs.workspace import require_same, sweep, working_in
from titan_tts.records.utterance import SPLITS
from titan_tts.share.card import card
from titan_tts.share.export_shard import open_shards
from titan_tts.share.options import Options
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.data.dataset import shard_name
from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable, write_atomic
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.codec.interface import WITHOUT_WEIGHTS
from torchtitan.models.dit_tts.speech.codec.record import check_codec, recorded_codecs

STATE_NAME, CARD_NAME = "export.json", "README.md"


def export_data(options: Options) -> str:
    """Writes what is missing. Returns a report."""
    out = Path(options.out).resolve()
    check_writable(out / STATE_NAME, "OUT")
    with working_in(out, out.with_name(f".{out.name}.lock"), "data export", "OUT"):
        return _export(options, out)


def _export(options: Options, out: Path) -> str:
    shards = _shards_of(options.data)
    dataset = open_shards(shards.values())
    state, devices = {"to": options.to, "data": dataset.fingerprint, "private": "left out"}, ["cpu"]
    audio, codec = "", ""
    if options.to == "parquet":
        files = {name: f"{name}.parquet" for name in shards}
    else:
        devices = codec_devices(options.device, options.engine)
        codec = _codec_of(options, "cpu" if options.engine == "ray" else devices[0]).name
        state["audio"] = audio = options.audio
        files = {name: f"{name.replace('/', '-')}.tar" for name in shards}
    _begin(out, state)
    splits = [os.path.dirname(name) for name in shards]
    samples = np.bincount(dataset.shard, minlength=len(shards))
    jobs = [
        Job(name, (path, str(out / files[name]), split, audio, codec), int(count))
        for (name, path), split, count in zip(shards.items(), splits, samples, strict=True)
        if not (out / files[name]).exists()
    ]
    workers = options.workers or min(cores(), max(1, len(jobs)))
    left_out, function = set[str](), "titan_tts.share.export_shard:write_shard"
    with (
        open_engine(options.engine, max(workers, len(devices)), devices) as runner,
        progress("exporting", "sample", jobs, len(dataset) - sum(job.work for job in jobs)) as bar,
    ):
        for _, result in run_jobs(runner, function, jobs, bar, out):
            left_out.update(result["left_out"])
    sizes = {file: (out / file).stat().st_size for file in files.values()}
    if not (out / CARD_NAME).exists():
        text = card(options.data, out.name, dataset, splits, sizes, audio)
        write_atomic(out / CARD_NAME, text)
    report = (
        f"{options.out} is complete: {len(sizes)} files, {sum(sizes.values()) / 1e9:.3f} GB, {len(dataset)} samples; "
        f"{len(jobs)} files written now; fill in whose voices they are, and the licence, in {CARD_NAME}"
    )
    if left_out:
        report += f"\nleft out of the samples' JSON as private: {', '.join(sorted(left_out))}"
    return report


def _shards_of(data: str) -> dict[str, str]:
    """{name in the export, without suffix: path or URL} of all shards of a dataset: of the splits of an output of
    prepare, or as [data] path names them."""
    folders = [split for split in SPLITS if os.path.isdir(os.path.join(data, split))]
    entries = {split: os.path.join(data, split) for split in folders} or {"": data}
    found = [
        (os.path.join(split, shard_name(path)), path)
        for split, entry in entries.items()
        for path in find_shards(entry)
    ]
    if len(dict(found)) < len(found):
        raise InputError(f"{data}: has shards of the same name; export one folder at a time")
    return dict(found)


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


def _begin(out: Path, state: dict[str, Any]) -> None:
    """Makes the folder of a new export, or finds one of the same."""
    sweep(out)
    if not any(out.iterdir()):
        write_atomic(out / STATE_NAME, json.dumps(state, indent=1) + "\n")
    found = read_json(out / STATE_NAME)
    if not found:
        raise InputError(f"OUT = {out} holds no export; give a new folder")
    require_same(out, found, state, "give a new OUT, or remove this one")
