"""The codec that encoded a dataset, from the prepare.json next to it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.bounded import read_json_file
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import expand_braces, is_remote, local_path, matching_shards
from torchtitan.models.dit_tts.speech.codec import Codec, codec_kind

RECORD_NAME = "prepare.json"


@dataclass(frozen=True)
class RecordedCodec:
    """The codec of a prepare.json, and the processing of recordings before it."""

    path: str
    """the prepare.json, or an exported folder's config.json"""

    kind: str
    """as `codec_kind`"""

    fingerprint: str

    audio: dict[str, Any]
    """prepare's settings of the steps before the codec: loudness, max_silence ..."""

    settings: dict[str, Any] = field(default_factory=dict)
    """all of prepare's settings; an exported folder has none"""

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}, {self.fingerprint})"


def recorded_codecs(data_path: str | Sequence[str]) -> list[RecordedCodec]:
    """The codecs of local, prepared entries of [data] path, and of exported folders, which stand for the data
    of their models."""
    found = {}
    for entry in [data_path] if isinstance(data_path, str) else data_path:
        for folder in _folders(entry):
            if exported.is_exported(folder):
                content = exported.read_exported(Path(folder))
                name, codec = os.path.join(folder, exported.CONFIG), content["codec"]
                found[name] = RecordedCodec(
                    name, codec["kind"], codec["fingerprint"], content["audio"]
                )
                continue
            # It is OUTPUT/train as a rule: the record is in the folder above.
            for place in (folder, os.path.dirname(folder)):
                record = _read_record(os.path.join(place, RECORD_NAME))
                if record is not None:
                    found[record.path] = record
                    break
    return list(found.values())


def _folders(entry: str) -> list[str]:
    """The local folders of an entry of [data] path."""
    found = []
    for piece in [] if not entry or is_remote(entry) else expand_braces(entry):
        path = local_path(piece)
        if os.path.isdir(path):
            found.append(path)
        else:
            found += sorted(map(os.path.dirname, matching_shards(path) or [path]))
    return list(dict.fromkeys(found))


def _read_record(path: str) -> RecordedCodec | None:
    """None where there is no record of prepare's."""
    try:
        settings = read_json_file(path)["settings"]
        kind, audio = codec_kind(settings["codec"]), dict(settings.get("audio", {}))
        return RecordedCodec(path, kind, settings["codec_fingerprint"], audio, settings)
    except (OSError, KeyError, TypeError, AttributeError):
        return None
    except ValueError:
        raise InputError(
            f"{path}: is damaged, so that the codec of these latents is not known; copy it again, or remove it"
        ) from None


def check_kind(codec: str, data_path: str | Sequence[str]) -> None:
    """Raises InputError where [sampling] codec is of another kind than the data's, or these are of several
    codecs. Loads nothing."""
    records = recorded_codecs(data_path)
    for record in records:
        require(
            codec_kind(codec) == record.kind,
            f"[sampling] codec = {codec!r}, but according to {record.path} the latents of [data] path are "
            f"{record.kind}'s, which another codec turns into noise; set it to the data's codec",
        )
        require(
            record.fingerprint == records[0].fingerprint,
            f"[data] path names latents of two codecs: {record} and {records[0]}; prepare all recordings with the same "
            "codec",
        )


def check_codec(codec: Codec, data_path: str | Sequence[str]) -> None:
    """Raises InputError where a codec is not the one that encoded the data."""
    for record in recorded_codecs(data_path):
        require(
            codec.fingerprint == record.fingerprint,
            f"codec {codec.name!r} (fingerprint {codec.fingerprint}) is not the one that {record} names, whose latents "
            "the run was trained on; give that one by --codec",
        )


def check_same_codec(
    path: str | Sequence[str],
    data_path: str | Sequence[str],
    about: str = "[validation] path",
    remedy: str = "give held-out shards of the same",
) -> None:
    """Raises InputError where the data of a path, which the message calls `about`, were encoded by another codec than
    the training data."""
    known = {record.fingerprint: record for record in recorded_codecs(data_path)}
    for record in recorded_codecs(path):
        require(
            not known or record.fingerprint in known,
            f"{about}: {record} names another codec than {next(iter(known.values()), None)}; {remedy}",
        )
