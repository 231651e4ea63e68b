"""README.md of a dataset on the hub: what it holds, how to train from it, and the licences to fill in."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_tts.share.contents import PARQUET, figures, read_state
from torchtitan.models.dit_tts.text.vocabulary import named

_FILL_IN = "**to fill in**"
_SHOWN = 20


def card(folder: str, name: str, license: str, sizes: Mapping[str, int]) -> str:
    """Markdown with the metadata that the hub reads. `name`: of the dataset; `sizes`: of `contents.files`."""
    state = read_state(Path(folder)) or {}
    found = state.get("figures") or figures(folder)
    is_table = next(iter(sizes)).endswith(PARQUET)
    rate, drawn = found["frames_per_second"], "" if found["references"] else " drawn in training"
    table = {
        "languages": named(found["languages"], _SHOWN) or _FILL_IN,
        "speakers": f"{found['speakers']:,}" if found["speakers"] else "not named",
        "samples": f"{found['samples']:,}",
        **{
            f"hours of {split or 'speech'}": _FILL_IN if each is None else f"{each:,.3f}"
            for split, each in found["hours"].items()
        },
        "codec": found["codec"] or _FILL_IN,
        "sample rate": f"{found['sample_rate']:,} Hz" if found["sample_rate"] else _FILL_IN,
        "size": f"{sum(sizes.values()) / 1e9:,.3f} GB in {len(sizes):,} {'Parquet' if is_table else 'tar'} files",
    }
    get = f"hf download {name} --repo-type dataset --local-dir FOLDER"
    if kind := state.get("audio"):
        about = (
            f"Speech as {kind} with texts: tars of KEY.{kind} and KEY.json, decoded from latents."
        )
        use = [get, "titan-tts prepare FOLDER DATA"]
    else:
        about = "Speech as latents of a codec with texts, for titan-tts."
        frames = f"{rate:g} frames per second" if rate else f"frames per second {_FILL_IN}"
        table["latents"] = f"{found['channels']} channels, {frames}"
        table["references"] = drawn.strip() or f"{found['references']:,} stored"
        train = "titan-tts train CONFIG --data.path {}" + " --data.references drawn" * bool(drawn)
        url = hub_url(folder, name)
        use = [f"titan-tts data inspect {url}", train.format(url)]
        if is_table:
            again = "titan-tts prepare FOLDER DATA --format table"
            use = [get, again, train.format("DATA/train")]
    rows = "\n".join(f"| {key} | {value} |" for key, value in table.items())
    return f"""---
{_front_matter(license, found, is_table)}
---

# {name}

{about}

| | |
|---|---|
{rows}

```bash
{chr(10).join(use)}
```

Whose voices these are, what they agreed to, and the licence of the recordings: {_FILL_IN}.
"""


def hub_url(folder: str, name: str) -> str:
    """The training shards on the hub, as [data] path."""
    below = "/train" if os.path.isdir(os.path.join(folder, "train")) else ""
    return f"hf://{name}{below}"


def _front_matter(license: str, found: dict[str, Any], is_table: bool) -> str:
    """YAML; values are written as JSON, which is YAML, too."""
    values: dict[str, Any] = {
        "license": license,
        "language": found["languages"],
        "task_categories": ["text-to-speech"],
        "tags": ["titan-tts", "speech", "audio-latents"],
    }
    if is_table:
        parts = [
            {"split": split or "train", "path": f"{split and split + '/'}*{PARQUET}"}
            for split in found["hours"]
        ]
        values["configs"] = [{"config_name": "default", "data_files": parts}]
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items() if value)
