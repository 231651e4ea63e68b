"""Exports a dataset, one file per shard, in parallel processes; each file is complete or absent.

OUT/export.json                          what it is made from and how; another export is refused
OUT/train/shard-000000.parquet ...       of DATA/train/shard-000000.tar ...
OUT/train-shard-000000.tar ...           or its audio
OUT/README.md                            the card, once all is there; one that is there stays
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.jobs.engines import codec_devices, cores, open_engine
from titan_tts.jobs.run import Job, progress, run_jobs
from titan_tts.jobs.workspace import begin, working_in
from titan_tts.records.utterance import SPLITS
from titan_tts.share.export_shard import open_shards
from titan_tts.share.options import Options
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.data.dataset import Dataset, shard_name
from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import check_writable, write_atomic
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.codec.interface import WITHOUT_WEIGHTS
from torchtitan.models.dit_tts.speech.codec.record import check_codec, recorded_codecs
from torchtitan.models.dit_tts.text.vocabulary import named

STATE_NAME, CARD_NAME = "export.json", "README.md"

_FILL_IN = "**to fill in**"
_SHOWN = 20


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
    begin(out, STATE_NAME, state, "give a new OUT, or remove this one")
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


def card(
    data: str, name: str, dataset: Dataset, splits: list[str], sizes: Mapping[str, int], audio: str
) -> str:
    """Markdown with the metadata that the hub reads.

    Args:
        data: the path of the dataset, next to which is its prepare.json.
        name: of the export.
        splits: of each shard of the dataset; "" where it has none.
        sizes: {file of the export: bytes}
        audio: suffix of the recordings in tars; "" for Parquet files of latents.
    """
    records = recorded_codecs(data)
    record = read_json(Path(records[0].path)) if records else {}
    rate, hours = record.get("frames_per_second"), {}
    of_samples = np.array(splits)[dataset.shard]
    for split in sorted(set(splits), reverse=True):
        seconds = int(dataset.frames[of_samples == split].sum()) / (rate or 1)
        hours[f"hours of {split or 'speech'}"] = f"{seconds / 3600:,.3f}" if rate else _FILL_IN
    languages, speakers = (sorted(dataset.labels(each)[1]) for each in ("language", "speaker"))
    references = int((dataset.reference_frames > 0).sum())
    kind = f"{records[0].kind}, fingerprint {records[0].fingerprint}" if records else _FILL_IN
    table = {
        "languages": named(languages, _SHOWN) or _FILL_IN,
        "speakers": f"{len(speakers):,}" if speakers else "not named",
        "samples": f"{len(dataset):,}",
        **hours,
        "codec": kind,
        "sample rate": f"{record['sample_rate']:,} Hz" if "sample_rate" in record else _FILL_IN,
        "size": f"{sum(sizes.values()) / 1e9:,.3f} GB in {len(sizes):,} files",
    }
    if audio:
        about = f"Speech as {audio} with texts: tars of KEY.{audio} and KEY.json, decoded from latents of the codec."
        layout, drawn = "webdataset", ""
    else:
        frames = f"{rate:g} frames per second" if rate else f"frames per second {_FILL_IN}"
        table["latents"] = f"{dataset.latent_channels} channels, {frames}"
        table["references"] = f"{references:,} stored" if references else "drawn in training"
        about = "Speech as latents of a codec with texts, for titan-tts."
        layout, drawn = "table", "" if references else " --data.references drawn"
    rows = "\n".join(f"| {key} | {value} |" for key, value in table.items())
    return f"""---
{_front_matter(languages, [] if audio else sorted(set(splits), reverse=True))}
---

# {name}

{about}

| | |
|---|---|
{rows}

```bash
hf download OWNER/NAME --repo-type dataset --local-dir FOLDER
titan-tts prepare FOLDER DATA --format {layout}
titan-tts train CONFIG --data.path DATA/train{drawn}
```

Whose voices these are, what they agreed to, and the licence of the recordings: {_FILL_IN}.
"""


def _front_matter(languages: list[str], splits: list[str]) -> str:
    """YAML; values are written as JSON, which is YAML, too. `splits`: of Parquet files, which the hub shows as tables."""
    files = [
        {"split": split or "train", "path": os.path.join(split, "*.parquet")} for split in splits
    ]
    values: dict[str, Any] = {
        "language": languages,
        "task_categories": ["text-to-speech"],
        "tags": ["titan-tts", "speech", "audio-latents"],
        "configs": [{"config_name": "default", "data_files": files}] if files else [],
    }
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items() if value)
