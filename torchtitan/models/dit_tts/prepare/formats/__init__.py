"""Readers of corpora, one module a family of formats; `open_corpus` finds the right one.

A reader lists what a source holds, in an order that is always the same, without decoding anything.
Another format is a class with the members of ``Reader`` and a line in ``FORMATS``.
"""

import glob
import importlib
import os
from collections.abc import Iterator
from typing import Protocol

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import is_remote
from torchtitan.models.dit_tts.prepare.recordings import Item, ItemRules, Unusable


class Reader(Protocol):
    """One corpus.

    Attributes:
        root: folder that the items' paths are relative to.
        self_contained: everything is in the files that `files` lists, audio included.
    """

    root: str
    self_contained: bool

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Whether the layout at `source` is this format's."""

    def __init__(self, source: str, rules: ItemRules): ...

    def files(self) -> list[str]:
        """Paths below `root` of the lists or containers that the corpus is made of."""

    def items(self) -> Iterator[Item | Unusable]:
        """All recordings."""


FORMATS = {
    "ljspeech": ("trees:LJSpeech", "folder of metadata.csv (id|text|normalized) and wavs/"),
    "libritts_r": ("trees:LibriTTSR", "SUBSET/SPEAKER/CHAPTER/UTT.wav with UTT.normalized.txt"),
    "manifest": ("manifest:Manifest", "a .csv, .tsv or .jsonl with an audio and a text column"),
    "webdataset": (
        "webdataset:AudioWebDataset",
        "tars of KEY.flac (opus, mp3, wav ...) + KEY.json",
    ),
    "table": ("table:TableCorpus", ".parquet or .arrow files with an audio or a latents column"),
}
"""name -> (module:class, layout in words)"""


def open_corpus(source: str, format: str, rules: ItemRules) -> Reader:
    """The reader of a source; `format` "auto" goes by the layout.

    Raises:
        InputError: nothing there, an unknown or ambiguous layout, or no recording in it.
    """
    if format == "auto":
        _check_exists(source)
        # Behind a URL only tars are read.
        found = ["webdataset"] if is_remote(source) else None
        found = found or [name for name in FORMATS if _reader_class(name).recognises(source)]
        if len(found) != 1:
            state = f"could be {' or '.join(found)}" if found else "has no layout that is known"
            kinds = "; ".join(f"{name}: {layout}" for name, (_, layout) in FORMATS.items())
            raise InputError(f"{source}: {state}; name it with --format ({kinds})")
        format = found[0]
    elif format not in FORMATS:
        raise InputError(f"--format is '{format}'; allowed are auto, {', '.join(FORMATS)}")
    else:
        _check_exists(source)
    return _reader_class(format)(source, rules)


def _reader_class(name: str) -> type[Reader]:
    module, _, class_name = FORMATS[name][0].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)


def _check_exists(source: str) -> None:
    if not is_remote(source) and not has_pattern(source) and not os.path.exists(source):
        raise InputError(f"{source}: does not exist; give a folder, a file or a glob of recordings")


def has_pattern(source: str) -> bool:
    return glob.has_magic(source) or "{" in source


def find_files(source: str, suffixes: tuple[str, ...], below: bool = False) -> list[str]:
    """Absolute paths of a source's files with these suffixes, sorted; empty where there are none.

    `source` is one file, a folder (with what lies below it where `below` is set), a glob or a
    pattern with braces. Hidden files are left out.
    """
    if has_pattern(source) and not os.path.exists(source):
        from braceexpand import UnbalancedBracesError, braceexpand

        try:
            patterns = list(braceexpand(source))
        except UnbalancedBracesError:
            patterns = [source]
        paths = []
        for pattern in patterns:
            found = glob.glob(pattern) if glob.has_magic(pattern) else [pattern]
            if "{" in source and not all(os.path.isfile(path) for path in found):
                raise InputError(f"{source}: {pattern} does not exist; correct the pattern")
            paths += found
    elif os.path.isdir(source):
        pattern = "**/*" if below else "*"
        paths = glob.glob(os.path.join(glob.escape(source), pattern), recursive=True)
    else:
        paths = [source]
    paths = [os.path.abspath(path) for path in paths if path.endswith(suffixes)]
    return sorted({path for path in paths if os.path.isfile(path)})


def common_folder(paths: list[str]) -> str:
    """The deepest folder that all files lie below."""
    return os.path.commonpath([os.path.dirname(path) for path in paths])
