"""README.md of an exported dataset: what it holds, and how to train from it. The hub shows it, and reads its head."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.speech.codec.record import recorded_codecs
from torchtitan.models.dit_tts.text.vocabulary import named

_FILL_IN = "**to fill in**"
_SHOWN = 20


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
