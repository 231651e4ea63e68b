"""What a dataset's latents were made by, as the prepare.json that lies with it says."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.models.dit_tts.codec import Codec, codec_kind
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote, local_path

RECORD_NAME = "prepare.json"


@dataclass(frozen=True)
class RecordedCodec:
    """What prepare wrote down of its codec, and of what it does before that."""

    path: str
    """of the prepare.json"""

    kind: str
    """as `codec_kind`"""

    fingerprint: str

    audio: dict[str, Any]
    """prepare's settings of the steps before the codec: loudness, max_silence ..."""


def recorded_codecs(data_path: str | Sequence[str]) -> list[RecordedCodec]:
    """Of each entry of [data] path that is on this machine and was prepared here; others have none."""
    found = {}
    for entry in [data_path] if isinstance(data_path, str) else data_path:
        for path in _record_paths(entry):
            record = _read_record(path)
            if record is not None:
                found[path] = record
                break
    return list(found.values())


def _record_paths(entry: str) -> list[str]:
    """Where an entry's record may lie: beside its shards, or in the folder above.

    An entry is OUTPUT/train, or a tar or pattern in it; further up lies what is not the data's.
    """
    if not entry or is_remote(entry):
        return []
    path = local_path(entry)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return [os.path.join(place, RECORD_NAME) for place in (folder, os.path.dirname(folder))]


def _read_record(path: str) -> RecordedCodec | None:
    """None where there is no record of prepare's."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)["settings"]
        kind, audio = codec_kind(settings["codec"]), dict(settings.get("audio", {}))
        return RecordedCodec(path, kind, settings["codec_fingerprint"], audio)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_kind(codec: str, data_path: str | Sequence[str]) -> None:
    """Raises InputError where [sampling] codec is of another kind than the data's. Loads nothing."""
    for record in recorded_codecs(data_path):
        if codec_kind(codec) != record.kind:
            raise InputError(
                f"[sampling] codec = {codec!r}, but {record.path} says that the latents of [data] path "
                f"are {record.kind}'s, which another codec turns into noise; set codec to the one "
                f"that the data were prepared with"
            )


def check_codec(codec: Codec, data_path: str | Sequence[str]) -> None:
    """Raises InputError where a codec is not the one that encoded the data."""
    for record in recorded_codecs(data_path):
        if codec.fingerprint != record.fingerprint:
            raise InputError(
                f"codec {codec.name!r} (fingerprint {codec.fingerprint}) is not the one that {record.path} "
                f"names ({record.kind}, {record.fingerprint}), whose latents the run was trained on; "
                f"give that one by --codec"
            )
