"""Tars in the audio-WebDataset layout: KEY.flac (or another audio suffix), KEY.json, KEY.txt.

The JSON has the columns (text, speaker, ...); its text may stand in KEY.txt instead. Members of one
recording may lie anywhere in their tar; members of other kinds are passed over. Every header is
checked, so that a corrupt tar is never a short list (see `data/tar_reader`).
"""

import json
import os
from collections.abc import Iterator

from torchtitan.models.dit_tts.data.storage import ShardFile, find_shards, open_source
from torchtitan.models.dit_tts.data.tar_reader import Member, walk_members
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote
from torchtitan.models.dit_tts.prepare.formats import common_folder, find_files
from torchtitan.models.dit_tts.prepare.recordings import (
    TEXT_NAMES,
    Item,
    Unusable,
    make_item,
    sample_key,
)
from torchtitan.models.dit_tts.prepare.settings import Options

AUDIO_SUFFIXES = ("opus", "ogg", "flac", "wav", "mp3", "m4a", "aac", "webm", "mp4", "aiff")


class AudioWebDataset:
    """Its keys are the members' own, behind the tar's name where there are several tars."""

    self_contained = True

    def __init__(self, options: Options):
        self.options, source = options, options.source
        if is_remote(source):
            self.root, self.names = "", find_shards(source)
            return
        # A file that is asked for by name is a tar whatever it is called.
        paths = find_files(source, (".tar",)) or (
            [os.path.abspath(source)] if os.path.isfile(source) else []
        )
        if not paths:
            raise InputError(
                f"{source}: holds no .tar file; give a tar, a folder or a glob of them"
            )
        self.root = common_folder(paths)
        self.names = [os.path.relpath(path, self.root) for path in paths]

    @classmethod
    def recognizes(cls, source: str) -> bool:
        return bool(find_files(source, (".tar",)))

    def files(self) -> list[str]:
        return list(self.names)

    def items(self) -> Iterator[Item | Unusable]:
        for name in self.names:
            source = open_source(os.path.join(self.root, name))
            try:
                yield from self._tar_items(source, name)
            finally:
                source.close()

    def _tar_items(self, source: ShardFile, name: str) -> Iterator[Item | Unusable]:
        problems: list[str] = []
        recordings: dict[str, dict[str, list[Member]]] = {}
        for member in walk_members(source, problems.append):
            folder, slash, basename = member.name.rpartition("/")
            stem, _, suffix = basename.partition(".")
            kind = "audio" if suffix.lower() in AUDIO_SUFFIXES else suffix.lower()
            if stem and kind in ("audio", "json", "txt"):
                recording = recordings.setdefault(folder + slash + stem, {})
                recording.setdefault(kind, []).append(member)
        for sentence in problems:
            yield Unusable(name, sentence)
        if not recordings and not problems:
            yield Unusable(name, "holds no recording; pairs of KEY.flac and KEY.json are needed")
        # The same key in two tars is usual; one tar's keys need no prefix.
        prefix = f"{name.removesuffix('.tar')}/" if len(self.names) > 1 else ""
        for own_name, members in recordings.items():
            key = sample_key(prefix + own_name)
            yield self._item(source, name, key, members)

    def _item(
        self, source: ShardFile, tar: str, key: str, members: dict[str, list[Member]]
    ) -> Item | Unusable:
        for kind, needed in (("audio", "an audio member"), ("json", "KEY.json")):
            if kind not in members:
                return Unusable(key, f"is incomplete: it lacks {needed}")
        for kind, found in members.items():
            if len(found) > 1 or found[0].is_link:
                return Unusable(key, f"has more than one {kind} member, or a link as one")
        try:
            row = json.loads(_read(source, members["json"][0]))
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            return Unusable(key, "has a KEY.json that is not JSON, or no object")
        text = self.options.text_column
        names = (text,) if text else TEXT_NAMES
        if "txt" in members and all(row.get(name) is None for name in names):
            row[names[0]] = _read(source, members["txt"][0]).decode("utf-8", "replace").strip()
        audio = members["audio"][0]
        place = {"tar": tar, "start": audio.offset, "bytes": audio.size}
        return make_item(row, key, place, self.options)


def _read(source: ShardFile, member: Member) -> bytes:
    return source.pread(member.size, member.offset)
