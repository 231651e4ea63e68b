"""Tars in the audio-WebDataset layout: KEY.flac (or another audio suffix), KEY.json, KEY.txt.

The JSON has the columns (text, speaker, ...); its text may stand in KEY.txt instead. Members of one
recording may lie anywhere in their tar; members of other kinds are passed over. Every header is
checked, so that a damaged tar is never a short list (see ``data/tar_members``).
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from torchtitan.models.dit_tts.data.storage import ShardFile, find_shards, open_source
from torchtitan.models.dit_tts.data.tar_reader import BLOCK_BYTES, Member, shown, walk_members
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


@dataclass
class _Walk:
    """What was found in a tar, to estimate what its damaged parts held."""

    name: str
    recordings: int = 0
    read_bytes: int = 0  # of members that were found
    lost_bytes: int = 0  # that no header could be found for
    problems: int = 0
    is_cut: bool = False  # without an end: it may have held any number more


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
        walks = []
        for name in self.names:
            source = open_source(os.path.join(self.root, name))
            walks.append(_Walk(name))
            try:
                yield from self._tar_items(source, name, walks[-1])
            finally:
                source.close()
        yield from _lost(walks)

    def _tar_items(self, source: ShardFile, name: str, walk: _Walk) -> Iterator[Item | Unusable]:
        damage: list[str] = []
        recordings: dict[str, dict[str, list[Member]]] = {}
        end = told = 0
        for member in walk_members(source, damage.append):
            start = member.offset - BLOCK_BYTES
            if len(damage) > told:
                walk.lost_bytes += start - end
                told = len(damage)
            end = member.offset + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
            walk.read_bytes += end - start
            folder, slash, basename = member.name.rpartition(b"/")
            stem, _, suffix = basename.partition(b".")
            kind = shown(suffix).lower()
            kind = "audio" if kind in AUDIO_SUFFIXES else kind
            if stem and kind in ("audio", "json", "txt"):
                own_name = shown(folder + slash + stem)
                recordings.setdefault(own_name, {}).setdefault(kind, []).append(member)
        if len(damage) > told:
            walk.lost_bytes += source.size - end
        walk.recordings, walk.problems = len(recordings), len(damage)
        walk.is_cut = bool(damage) and not _has_end(source)
        for sentence in damage:
            yield Unusable(name, sentence.rstrip("."))
        if not recordings and not damage:
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


def _has_end(source: ShardFile) -> bool:
    """Whether the tar's last block is that of an end-of-archive marker."""
    place = max(0, source.size - BLOCK_BYTES)
    return source.size % BLOCK_BYTES == 0 and not any(source.pread(BLOCK_BYTES, place))


def _lost(walks: list[_Walk]) -> Iterator[Unusable]:
    """An estimate of the recordings that damaged tars no longer show.

    By the bytes that no header was found for; a tar that is cut short is taken to have held as many
    recordings as its whole neighbours do (their median), or twice what is left where there are none.
    """
    found = sum(walk.recordings for walk in walks)
    mean_bytes = max(1.0, sum(walk.read_bytes for walk in walks) / max(1, found))
    whole = [walk.recordings for walk in walks if not walk.is_cut]
    for walk in walks:
        if not walk.problems:
            continue
        lost = walk.lost_bytes / mean_bytes
        if walk.is_cut:
            usual = median(whole) if whole else 2 * walk.recordings
            lost = max(lost, usual - walk.recordings)
        more = round(lost) - walk.problems  # each problem counts as one already
        if more > 0:
            sentence = f"is damaged, and about {more} more of its recordings are lost"
            yield Unusable(walk.name, sentence, more)


def _read(source: ShardFile, member: Member) -> bytes:
    if member.size <= len(member.head):
        return member.head
    return source.pread(member.size, member.offset)


def _parse(text: bytes) -> dict | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
