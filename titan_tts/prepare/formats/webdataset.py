"""Tars in the audio-WebDataset layout: KEY.flac (or another audio suffix), KEY.json, KEY.txt.

The JSON has the columns (text, speaker, ...); its text may stand in KEY.txt instead. Members of one
recording may lie anywhere in their tar; members of other kinds are passed over. Every header is
checked, so that a corrupt tar is never a short list (see `data/tar_reader`).
"""

import os
from collections.abc import Iterator
from contextlib import closing

from titan_tts.prepare.formats import AUDIO_SUFFIXES, common_folder, find_files
from titan_tts.prepare.settings import Options
from titan_tts.records.columns import TEXT_NAMES, make_utterance, sample_key
from titan_tts.records.json_lines import NOT_UTF8, json_object
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.bounded import MAX_LINE
from torchtitan.models.dit_tts.data.storage import ShardFile, find_shards, open_source, plain_name
from torchtitan.models.dit_tts.data.tar_reader import Member, walk_members
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import is_remote, unique


class WebDataset:
    """Its keys are the members' own, behind the tar's name where there are several tars."""

    self_contained = True

    def __init__(self, options: Options):
        self.options, source = options, options.source
        if is_remote(source):
            paths = sorted(set(find_shards(source)), key=lambda url: (plain_name(url), url))
        else:
            paths = find_files(source, (".tar",))
            if not paths and os.path.isfile(source):  # a tar by another name
                paths = [os.path.abspath(source)]
        require(bool(paths), f"{source}: holds no .tar file; give a tar, a folder or a glob")
        plain = [plain_name(path) for path in paths]
        self.root = common_folder(plain)
        names = unique([os.path.relpath(path, self.root) for path in plain])
        self.tars = dict(zip(names, paths, strict=True))

    @classmethod
    def recognizes(cls, source: str) -> bool:
        return bool(find_files(source, (".tar",)))

    def files(self) -> dict[str, str]:
        return self.tars

    def items(self) -> Iterator[Utterance | Unusable]:
        for name, path in self.tars.items():
            with closing(open_source(path)) as source:
                yield from self._tar_items(source, name)

    def _tar_items(self, source: ShardFile, name: str) -> Iterator[Utterance | Unusable]:
        problems: list[str] = []
        recordings: dict[str, dict[str, list[tuple[Member, bytes]]]] = {}
        for member in walk_members(source, problems.append):
            folder, slash, basename = member.name.rpartition("/")
            stem, _, suffix = basename.partition(".")
            kind = "audio" if f".{suffix.lower()}" in AUDIO_SUFFIXES else suffix.lower()
            if stem and kind in ("audio", "json", "txt"):
                # Here, so that a remote tar is read once, from front to back.
                is_read = kind != "audio" and not member.is_link and member.size <= MAX_LINE
                content = source.pread(member.size, member.offset) if is_read else b""
                recording = recordings.setdefault(folder + slash + stem, {})
                recording.setdefault(kind, []).append((member, content))
        for sentence in problems:
            yield Unusable(name, sentence)
        if not recordings and not problems:
            yield Unusable(name, "holds no recording; pairs of KEY.flac and KEY.json are needed")
        # The same key in two tars is usual; one tar's keys need no prefix.
        prefix = f"{name.removesuffix('.tar')}/" if len(self.tars) > 1 else ""
        for own_name, members in recordings.items():
            yield self._item(name, sample_key(prefix + own_name), members)

    def _item(
        self, tar: str, key: str, members: dict[str, list[tuple[Member, bytes]]]
    ) -> Utterance | Unusable:
        for kind, needed in (("audio", "an audio member"), ("json", "KEY.json")):
            if kind not in members:
                return Unusable(key, f"is incomplete: it lacks {needed}")
        for kind, candidates in members.items():
            if len(candidates) > 1 or candidates[0][0].is_link:
                return Unusable(key, f"has more than one {kind} member, or one that is a link")
        row = json_object(members["json"][0][1])
        if row is None:
            return Unusable(key, "has a KEY.json that is not a JSON object")
        names = (self.options.text_column,) if self.options.text_column else TEXT_NAMES
        if "txt" in members and all(row.get(name) is None for name in names):
            try:
                row[names[0]] = members["txt"][0][1].decode().strip()
            except UnicodeDecodeError:
                return Unusable(key, f"has a KEY.txt that {NOT_UTF8}")
        audio, _ = members["audio"][0]
        place = {"tar": tar, "start": audio.offset, "bytes": audio.size}
        return make_utterance(row, key, place, self.options)
