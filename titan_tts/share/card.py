"""README.md of a dataset on the hub: what it holds, how to train from it, and the licences to fill in."""

import json
import os
from pathlib import Path
from typing import Any

from titan_tts.share.contents import PARQUET, figures, files, read_state
from titan_tts.share.options import PushOptions
from torchtitan.models.dit_tts.text.vocabulary import named

_FILL_IN = "**to fill in**"
_SHOWN = 20


def card(options: PushOptions) -> str:
    """Markdown with the metadata that the hub reads."""
    folder = Path(options.folder)
    state = read_state(folder) or {}
    is_audio = "audio" in state
    found = state.get("figures") or figures(options.folder)
    sizes = files(folder)
    kind = "Parquet" if next(iter(sizes)).endswith(PARQUET) else "tar"
    hours = {
        f"hours of {split or 'speech'}": _FILL_IN if each is None else f"{each:,.3f}"
        for split, each in found["hours"].items()
    }
    table = {
        "languages": named(found["languages"], _SHOWN) or _FILL_IN,
        "speakers": f"{found['speakers']:,}" if found["speakers"] else "not named",
        "samples": f"{found['samples']:,}",
        **hours,
        "codec": found["codec"] or _FILL_IN,
        "sample rate": f"{found['sample_rate']:,} Hz" if found["sample_rate"] else _FILL_IN,
        "size": f"{sum(sizes.values()) / 1e9:,.3f} GB in {len(sizes):,} {kind} files",
    }
    url = hub_url(options)
    if is_audio:
        about = f"Speech as {state['audio']} with texts: tars of KEY.{state['audio']} and KEY.json, decoded from latents."
        use = [
            f"hf download {options.name} --repo-type dataset --local-dir AUDIO",
            "titan-tts prepare AUDIO DATA",
        ]
    else:
        about = "Speech as latents of a codec with texts, for titan-tts"
        about += "." if kind == "Parquet" else ", which trains from here without a download before."
        rate = found["frames_per_second"]
        frames = f"{rate:g} frames per second" if rate else f"frames per second {_FILL_IN}"
        table["latents"] = f"{found['channels']} channels, {frames}"
        table["references"] = (
            f"{found['references']:,} stored" if found["references"] else "drawn in training"
        )
        drawn = "" if found["references"] else " --data.references drawn"
        use = [f"titan-tts data inspect {url}", f"titan-tts train CONFIG --data.path {url}{drawn}"]
        if kind == "Parquet":
            use = [
                f"hf download {options.name} --repo-type dataset --local-dir TABLES",
                "titan-tts prepare TABLES DATA --format table",
                f"titan-tts train CONFIG --data.path DATA/train{drawn}",
            ]
    rows = "\n".join(f"| {name} | {value} |" for name, value in table.items())
    return f"""---
{_front_matter(options, found, kind)}
---

# {options.name}

{about}

| | |
|---|---|
{rows}

```bash
{chr(10).join(use)}
```

Whose voices these are, what they agreed to, and the licence of the recordings: {_FILL_IN}.
"""


def hub_url(options: PushOptions) -> str:
    """The training shards on the hub, as [data] path."""
    below = "/train" if os.path.isdir(os.path.join(options.folder, "train")) else ""
    return f"hf://{options.name}{below}"


def _front_matter(options: PushOptions, found: dict[str, Any], kind: str) -> str:
    """YAML; values are written as JSON, which is YAML, too."""
    values: dict[str, Any] = {
        "license": options.license,
        "language": found["languages"],
        "task_categories": ["text-to-speech"],
        "tags": ["titan-tts", "speech", "audio-latents"],
    }
    if kind == "Parquet":
        parts = [
            {"split": split or "train", "path": f"{split and split + '/'}*{PARQUET}"}
            for split in found["hours"]
        ]
        values["configs"] = [{"config_name": "default", "data_files": parts}]
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items() if value)
