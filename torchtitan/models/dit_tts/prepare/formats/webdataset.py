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
    ItemRules,
    Unusable,
    make_item,
    sample_key,
)

AUDIO_SUFFIXES = ("opus", "ogg", "flac", "wav", "mp3", "m4a", "aac", "webm", "mp4", "aiff")


class AudioWebDataset:
    self_contained = True

    def __init__(self, source: str, rules: ItemRules):
        self.rules = rules
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
    def recognises(cls, source: str) -> bool:
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
            kind = suffix.lower()
            kind = "audio" if kind in AUDIO_SUFFIXES else kind
            if stem and kind in ("audio", "json", "txt"):
                own_name = folder + slash + stem
                recordings.setdefault(own_name, {}).setdefault(kind, []).append(member)
        for sentence in problems:
            yield Unusable(name, sentence)
        if not recordings and not problems:
            yield Unusable(name, "holds no recording; pairs of KEY.flac and KEY.json are needed")
        # The same key in two tars is usual; one tar's keys need no prefix.
        prefix = f"{name.removesuffix('.tar')}/" if len(self.names) > 1 else ""
        for own_name, members in recordings.items():
            yield self._item(source, name, prefix, own_name, members)

    def _item(
        self,
        source: ShardFile,
        tar: str,
        prefix: str,
        own_name: str,
        members: dict[str, list[Member]],
    ) -> Item | Unusable:
        key = sample_key(prefix + own_name)
        for kind, needed in (("audio", "an audio member"), ("json", "KEY.json")):
            if kind not in members:
                return Unusable(key, f"is incomplete: it lacks {needed}")
        for kind, found in members.items():
            if len(found) > 1:
                return Unusable(key, f"has more than one {kind} member")
            if found[0].is_link:
                return Unusable(key, f"has a link as its {kind} member, not a file")
        row = _parse(_read(source, members["json"][0]))
        if row is None:
            return Unusable(key, f"has a {own_name}.json that is not JSON, or no object")
        names = (self.rules.text_column,) if self.rules.text_column else TEXT_NAMES
        if "txt" in members and all(row.get(name) is None for name in names):
            row[names[0]] = _read(source, members["txt"][0]).decode("utf-8", "replace").strip()
        audio = members["audio"][0]
        place = {"tar": tar, "start": audio.offset, "bytes": audio.size}
        return make_item(row, key, place, self.rules)


def _read(source: ShardFile, member: Member) -> bytes:
    return source.pread(member.size, member.offset)


def _parse(text: bytes) -> dict | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
