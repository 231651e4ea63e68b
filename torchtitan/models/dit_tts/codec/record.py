"""Which codec a dataset's latents came from, by the prepare.json that lies with it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.models.dit_tts.codec import Codec, codec_kind
from torchtitan.models.dit_tts.errors import InputError

RECORD_NAME = "prepare.json"

# An entry may be OUTPUT, OUTPUT/train, or OUTPUT/train/*.tar.
_LEVELS = 2


@dataclass(frozen=True)
class RecordedCodec:
    """What prepare wrote down of its codec."""

    path: str
    """of the prepare.json"""

    kind: str
    """as `codec_kind`"""

    fingerprint: str


def recorded_codecs(data_path: str | Sequence[str]) -> list[RecordedCodec]:
    """Of each entry of [data] path that is on this machine and was prepared here; others have none."""
    found = {}
    for entry in [data_path] if isinstance(data_path, str) else data_path:
        for folder in (Path(entry), *Path(entry).parents[:_LEVELS]):
            path = folder / RECORD_NAME
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
                record = RecordedCodec(
                    str(path), codec_kind(settings["codec"]), settings["codec_fingerprint"]
                )
            except (OSError, ValueError, KeyError, TypeError):
                continue
            found[os.path.abspath(path)] = record
            break
    return list(found.values())


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
