"""What a folder of shards holds: its files by split, what is private in it, and figures from their indexes."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.prepare.work_folder import read_record
from titan_tts.records.utterance import SPLITS
from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset, shard_name
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.members import VERBATIM
from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError, without_secrets
from torchtitan.models.dit_tts.files import shards_in
from torchtitan.models.dit_tts.speech.codec.record import recorded_codecs
from torchtitan.models.dit_tts.text.vocabulary import named

STATE_NAME = "export.json"
PARQUET = ".parquet"
# A string in JSON; not the phonemes "/a/".
_ABSOLUTE_PATH = re.compile(
    r'(?<!\\)"((file:|~)?/([^"/]+"|[^"]+/[^"]+")|[A-Za-z]:(/|\\\\)|\\\\\\\\)'
)


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
    if len(dict(found)) < len(found):
        raise InputError(f"{data}: has shards of the same name; export one folder at a time")
    return dict(found)


def open_shards(paths: Iterable[str]) -> Dataset:
    """The samples of shards, whatever the width of their latents."""
    paths = list(paths)
    channels = (index.channels for index in map(load_index, paths) if len(index))
    return open_dataset(paths, next(channels, 128))


def files(folder: Path) -> dict[str, int]:
    """{name: bytes} of the shards, or tars of audio, of a folder. Refused where they are not those that its export
    or preparation wrote."""
    root = folder.absolute()
    below = [each for split in SPLITS if (each := root / split).is_dir()] or [root]
    paths = sorted(path for each in below for path in shards_in(each, PARQUET))
    paths = paths or list(shards_of(str(folder)).values())
    found = {os.path.relpath(path, root): os.path.getsize(path) for path in paths}
    state, record = read_state(folder), read_record(folder)
    wanted, by = found, ""
    if state is not None:  # without "shards" until it is complete
        wanted, by = state.get("shards", {}), "data export"
    elif record is not None:
        wanted, by = {name: each["bytes"] for name, each in record["shards"].items()}, "prepare"
    if other := {name for name, _ in wanted.items() ^ found.items()}:
        raise InputError(
            f"{folder}: {named(sorted(other), 3)} unfinished, missing, cut or foreign; run titan-tts {by} again, or move "
            "foreign files away"
        )
    return found


def private_columns(metadata: Mapping[str, Any]) -> list[str]:
    """Names in a sample's JSON that tell who annotated it, where files lie on a machine, or how to log in to a store."""

    def is_private(value: Any) -> bool:
        return without_secrets(value) != value or bool(_ABSOLUTE_PATH.search(json.dumps(value)))

    others = [name for name in metadata if name not in ("text", VERBATIM)]
    return [name for name in others if name == "annotator" or is_private(metadata[name])]


def read_state(folder: Path) -> dict[str, Any] | None:
    """What an export's folder was made from and how; None where it is none."""
    return read_json(folder / STATE_NAME) or None


def figures(data: str, rate: float | None = None) -> dict[str, Any]:
    """What the indexes of a dataset of latents tell, as JSON. `rate`: of the latents' frames, where the codec is known;
    else it is prepare.json's, and without one the hours are not known."""
    shards = shards_of(data)
    dataset = open_shards(shards.values())
    splits = np.array([os.path.dirname(name) for name in shards])[dataset.shard]
    languages, speakers = (sorted(dataset.labels(each)[1]) for each in ("language", "speaker"))
    records = recorded_codecs(data)
    record = read_json(Path(records[0].path)) if records else {}
    rate = rate or record.get("frames_per_second")
    return {
        "languages": languages,
        "speakers": len(speakers),
        "samples": len(dataset),
        "hours": {
            split: rate and round(int(dataset.frames[splits == split].sum()) / rate / 3600, 3)
            for split in sorted(set(splits.tolist()), reverse=True)
        },
        "codec": f"{records[0].kind}, fingerprint {records[0].fingerprint}" if records else "",
        "sample_rate": record.get("sample_rate", 0),
        "channels": dataset.latent_channels,
        "frames_per_second": rate,
        "references": int((dataset.reference_frames > 0).sum()),
    }
