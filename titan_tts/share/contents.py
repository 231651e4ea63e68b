"""What a folder of shards holds: its files by split, and figures from their indexes."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from titan_tts.prepare.recordings import SPLITS
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset, shard_name
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec.record import recorded_codecs

STATE_NAME = "export.json"
_DEFAULT_FRAME_RATE = 25.0


def shards_of(data: str) -> dict[str, str]:
    """{name in an export, without suffix: path or URL} of all shards of a dataset: of the splits of an output of
    prepare, or as [data] path names them."""
    folders = [split for split in SPLITS if os.path.isdir(os.path.join(data, split))]
    entries = {split: os.path.join(data, split) for split in folders} or {"": data}
    found = [
        (os.path.join(split, shard_name(path)), path)
        for split, entry in entries.items()
        for path in find_shards(entry)
    ]
    name, count = Counter(name for name, _ in found).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"{data}: has {count} shards of the name {name}; export one folder at a time"
        )
    return dict(found)


def figures(data: str) -> dict[str, Any]:
    """What the indexes of a dataset of latents tell, as JSON."""
    shards = shards_of(data)
    opened: dict[str, Dataset] = {}
    channels = load_index(next(iter(shards.values()))).channels
    for split in sorted({os.path.dirname(name) for name in shards}, reverse=True):
        paths = [path for name, path in shards.items() if os.path.dirname(name) == split]
        opened[split] = open_dataset(paths, channels)
    records = recorded_codecs(data)
    record = json.loads(Path(records[0].path).read_text()) if records else {}
    rate = record.get("frames_per_second", _DEFAULT_FRAME_RATE)
    labels = {
        label: sorted(set().union(*(part.labels(label)[1] for part in opened.values())))
        for label in ("language", "speaker")
    }
    return {
        "languages": labels["language"],
        "speakers": len(labels["speaker"]),
        "samples": sum(map(len, opened.values())),
        "hours": {
            split: round(int(part.frames.sum()) / rate / 3600, 3) for split, part in opened.items()
        },
        "codec": f"{records[0].kind}, fingerprint {records[0].fingerprint}" if records else "",
        "sample_rate": record.get("sample_rate", 0),
        "channels": channels,
        "frames_per_second": rate,
        "references": sum(int((part.reference_frames > 0).sum()) for part in opened.values()),
    }
