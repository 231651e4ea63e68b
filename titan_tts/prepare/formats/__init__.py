"""Readers of corpora, one module per family of formats; `open_corpus` finds the right one.

A reader lists what a source holds, always in the same order, without decoding anything. To add a
format, write a class with the members of `Reader` and name it in `FORMATS`.
"""

import errno
import glob
import importlib
import os
from collections.abc import Iterator
from typing import Protocol

from braceexpand import braceexpand

from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.files import is_remote

AUDIO_SUFFIXES = tuple(
    ".wav .wave .flac .ogg .oga .opus .mp3 .mp2 .m4a .m4b .mp4 .aac .webm .mka .mkv .mov .wma .aif .aiff .caf .w64 "
    ".au".split()
)


class Reader(Protocol):
    """One corpus.

    Attributes:
        root: folder that the paths of its utterances are relative to.
        self_contained: everything is in the files that `files` lists, audio included.
    """

    root: str
    self_contained: bool

    @classmethod
    def recognizes(cls, source: str) -> bool:
        """True if the layout at `source` can only be this format's; of two that claim it the user has to choose."""
        ...

    def __init__(self, options: Options): ...

    def files(self) -> dict[str, str]:
        """{name: path or URL} of its lists or containers; names stay when the corpus moves or a URL's signature changes.
        Not a file per recording: their content is in the items."""
        ...

    def items(self) -> Iterator[Utterance | Unusable]: ...


FORMATS = {
    "ljspeech": ("bars:Bars", "metadata.csv, a .txt or .list of path|text or path|speaker|text"),
    "libritts_r": ("trees:LibriTTSR", "SUBSET/SPEAKER/CHAPTER/UTT.wav with UTT.normalized.txt"),
    "manifest": ("manifest:Manifest", "a .csv, .tsv or .jsonl with an audio and a text column"),
    "webdataset": ("webdataset:WebDataset", "tars of KEY.flac (opus, mp3, wav ...) + KEY.json"),
    "table": ("table:TableCorpus", ".parquet or .arrow files with an audio or a latents column"),
}
"""name -> (module:class, layout in words)"""


def find_format(source: str, name: str = "auto") -> str:
    """The format of that name; for "auto" the one whose layout the source has."""
    there = is_remote(source) or has_pattern(source) or os.path.exists(source)
    require(there, f"{source}: does not exist; give a folder, a file or a glob of recordings")
    kinds = "; ".join(f"{known}: {layout}" for known, (_, layout) in FORMATS.items())
    require(name in ("auto", *FORMATS), f"--format = {name!r}, but known are auto, {kinds}")
    if name != "auto":
        return name
    if is_remote(source):
        return "webdataset"  # behind a URL only tars are read
    matching = [known for known in FORMATS if _reader_class(known).recognizes(source)]
    if len(matching) != 1:
        state = f"could be {' or '.join(matching)}" if matching else "has no known layout"
        if source.lower().endswith(".zip"):
            raise InputError(f"{source}: is a zip archive; unpack it first")
        lists = find_files(source, (".csv", ".list", ".txt")) if os.path.isdir(source) else []
        remedy = f"name it with --format ({kinds})"
        remedy += f", or give the path of its list, such as {lists[0]}" if lists else ""
        raise InputError(f"{source}: {state}; {remedy}")
    return matching[0]


def open_corpus(options: Options) -> Reader:
    """The reader of `options.source`."""
    return _reader_class(find_format(options.source, options.format))(options)


def _reader_class(name: str) -> type[Reader]:
    module, _, class_name = FORMATS[name][0].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)


def has_pattern(source: str) -> bool:
    return glob.has_magic(source) or "{" in source


def find_files(source: str, suffixes: tuple[str, ...], below: bool = False) -> list[str]:
    """Absolute paths of a source's files with these suffixes, sorted; empty where there are none.

    `source` is one file, a folder (with what lies below it where `below` is set), a glob or a
    pattern with braces. Hidden files are left out.
    """
    if os.path.isdir(source):
        pattern = "**/*" if below else "*"
        paths = glob.glob(os.path.join(glob.escape(source), pattern), recursive=True)
    elif has_pattern(source) and not os.path.exists(source):
        paths = []
        for pattern in braceexpand(source):
            matches = glob.glob(pattern, recursive=True) if glob.has_magic(pattern) else [pattern]
            there = bool(matches) and all(map(os.path.isfile, matches))
            require("{" not in source or there, f"{source}: {pattern} does not exist")
            paths += matches
    else:
        paths = [source]
    paths = [os.path.abspath(path) for path in paths if path.endswith(suffixes)]
    return sorted({path for path in paths if os.path.isfile(path)})


# Errors of a path, not of the disk that it is on.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class SourceError(InputError):
    """A disk or store fails: the recording may be valid, so it is never left out as a corrupt one."""


def unreadable(path: str, error: OSError | ValueError) -> InputError:
    """The error of an audio file: a `SourceError` unless the path itself is wrong."""
    reason = getattr(error, "strerror", None) or error
    sentence = f"the audio file {path!r} cannot be read ({reason})"
    if isinstance(error, OSError) and error.errno not in _NO_FILE:
        return SourceError(f"{sentence}; check the disk and its rights and start again")
    return InputError(sentence)


def say_unlisted(error: OSError) -> None:
    """Report a folder that `os.walk` cannot list and would leave out silently."""
    show(f"{error.filename}: cannot be listed ({error.strerror}), so what it holds is left out")


def common_folder(paths: list[str]) -> str:
    return os.path.commonpath([os.path.dirname(path) for path in paths])
