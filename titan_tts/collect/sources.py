"""SOURCE of `titan-tts collect`: which recordings it names, and the hashes of their contents.

OUTPUT/sources.jsonl keeps what is known of each path, so that a content is read once. A job is one content: it is done
once its folder is there.
"""

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from titan_tts.collect.folder import RECORD_NAME, is_complete
from titan_tts.prepare.formats import AUDIO_SUFFIXES, find_files, has_pattern, say_unlisted
from titan_tts.records.json_lines import is_utf8
from torchtitan.models.dit_tts.bounded import parse_json, read_bytes
from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.storage import (
    READ_AHEAD_BYTES,
    open_source,
    plain_name,
    urls_of,
)
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import is_remote, local_path, write_atomic

LIST_SUFFIXES = (".txt", ".lst", ".list")
SOURCES_NAME = "sources.jsonl"
_MAX_SOURCES = 4 << 30  # bytes


class Source(NamedTuple):
    """A path or URL that was read, and the content that it had."""

    path: str
    name: str  # relative to the command's SOURCE
    size: int  # bytes
    version: int  # changes with the content, as of `data.storage.ShardFile`; 0: unknown
    file: str  # id of the content: a job's


def list_source(source: str, output: Path) -> dict[str, str]:
    """{path or URL: name relative to SOURCE} of the recordings of a folder and what lies below it, of a glob, of a list
    (a text file of paths and URLs, a line each), a single file, or the URL of one, of a folder or a glob; sorted by
    name. Of a folder those with the suffix of audio. What lies in `output`, a real path, is left out."""
    path = source if is_remote(source) else local_path(source)
    if path.endswith(LIST_SUFFIXES) and os.path.isfile(path):
        found = _listed(path)
    else:
        paths, is_folder = _in_store(path) if is_remote(path) else _on_disk(path)
        fixed = list(takewhile(lambda part: not has_pattern(part), path.rstrip("/").split("/")))
        root = "/".join(fixed if is_folder or has_pattern(path) else fixed[:-1]) + "/"
        found = {each: plain_name(each).removeprefix(plain_name(root)) for each in paths}
    for each in [*found]:
        if not is_remote(each) and output in Path(os.path.realpath(each)).parents:
            del found[each]  # it was made of recordings
        elif not is_utf8(each):
            shown = os.fsencode(each).decode(errors="backslashreplace")
            raise InputError(f"SOURCE: the name {shown} is not UTF-8; rename the file")
    require(
        bool(found),
        f"SOURCE = {source} contains no recordings (folders written by collect are left out); give a folder, glob or bucket "
        f"with audio files, or a list of them ({', '.join(LIST_SUFFIXES)})",
    )
    return dict(sorted(found.items(), key=lambda each: (each[1], each[0])))


def _listed(path: str) -> dict[str, str]:
    found = {}
    text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    # Not splitlines(): a name may hold other characters that end a line, such as U+2028.
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if line and not line.startswith("#"):
            target = line if is_remote(line) else os.path.join(os.path.dirname(path), line)
            is_there = is_remote(line) or os.path.isfile(target)
            require(
                is_there, f"{path} line {number}: {line} is not a file; correct or remove the line"
            )
            found[target] = plain_name(line)
    return found


def _is_audio(path: str) -> bool:
    return path.lower().endswith(AUDIO_SUFFIXES)


def _on_disk(path: str) -> tuple[list[str], bool]:
    """Files of a path or a glob, and whether it is a folder."""
    if not os.path.isdir(path):
        return find_files(path, ("",)), False
    found, seen = list[str](), set[str]()
    for folder, folders, names in os.walk(os.path.abspath(path), True, say_unlisted, True):
        # Links may lead in a circle; an output of this command, of whatever SOURCE, has parts of recordings.
        if (real := os.path.realpath(folder)) in seen or RECORD_NAME in names:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        folders.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return [each for each in found if _is_audio(each) and os.path.isfile(each)], True


def _in_store(url: str) -> tuple[list[str], bool]:
    """URLs of a URL or a glob of one, and whether it is a folder."""
    store, path = remote.filesystem(url)
    store.invalidate_cache()
    if glob.has_magic(path):
        return urls_of(url, remote.call(url, "listed", lambda: store.glob(path))), False
    if remote.call(url, "listed", lambda: store.isfile(path)):
        return [url], False
    names = remote.call(url, "listed", lambda: store.find(path))
    return urls_of(url, [each for each in names if _is_audio(each)]), True


def size_and_version(path: str) -> tuple[int, int]:
    """Bytes of a file or an object, and a number that changes with its content (0: unknown)."""
    if is_remote(path):
        return remote.stat(path, fresh=True)
    with closing(open_source(path)) as file:
        return file.size, file.version


def register(source: str, output: Path, prune: bool = False) -> dict[str, Source]:
    """Brings sources.jsonl up to SOURCE. Returns {FILE_ID: a source with that content, if possible one that SOURCE names}.

    What was read before and has the size and time of then is not read again, and a path whose content has changed
    stands for the new content. What earlier SOURCEs named stays if it is complete, unless `prune` forgets it.
    """
    list_path, listed = output / SOURCES_NAME, list_source(source, output)
    known = _known_sources(list_path)
    shown = tqdm(listed.items(), "reading names and contents", unit="file", mininterval=1.0)
    with open(list_path, "ab") as file:  # so that a killed command has noted what it has read
        for path, name in shown:
            found, before = size_and_version(path), known.get(path)
            is_same = before is not None and before[2:4] == found and found[1]
            content = before.file if before and is_same else content_id(path)
            known[path] = now = Source(path, name, *found, content)
            if now != before:
                # A new line first: the last one may be cut.
                file.write(f"\n{json.dumps(now._asdict())}".encode())
                file.flush()
    gone = known.keys() - listed.keys()
    left_out = {path for path in gone if prune or not is_complete(output, known[path].file)}
    left = [known[path] for path in known.keys() - left_out]
    write_atomic(list_path, "\n".join(json.dumps(each._asdict()) for each in left))
    left.sort(key=lambda each: (each.path not in listed, each.name, each.path), reverse=True)
    return {each.file: each for each in left}  # of several the last one stays


def _known_sources(path: Path) -> dict[str, Source]:
    """The last record of each path in sources.jsonl. A line that was cut by a kill is left out."""
    found = {}
    for line in read_bytes(path, _MAX_SOURCES).split(b"\n") if path.exists() else ():
        with suppress(ValueError, TypeError):
            source = Source(**parse_json(line))
            found[source.path] = source
    return found


def content_id(path: str) -> str:
    """FILE_ID of a file's or an object's bytes."""
    digest = hashlib.sha256()
    with closing(open_source(path)) as file:
        for start in range(0, file.size, READ_AHEAD_BYTES):
            digest.update(file.pread(READ_AHEAD_BYTES, start))
    return digest.hexdigest()[:16]


@contextmanager
def local_copy(source: Source, folder: Path) -> Iterator[str]:
    """The path of a recording, one of a store as a file in `folder` while the block runs. Raises InputError at the end
    where the content differs from what was listed."""
    path = source.path
    if is_remote(path):
        store, name = remote.filesystem(path)
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / "recording")
        remote.call(source.path, "downloaded", lambda: store.get_file(name, path))
    yield path
    if path != source.path:
        os.unlink(path)
    require(
        size_and_version(source.path) == (source.size, source.version),
        f"{plain_name(source.path)}: has changed since it was listed; run the command again",
    )
