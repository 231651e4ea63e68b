"""Parquet and Arrow tables: a row a recording, or a row an utterance that is encoded already.

Audio is a column `audio` (or another of its names): Hugging Face's struct of bytes and path, bytes,
or a path relative to the table. Ready latents are a column `latents`, and a `reference` where there
is one: lists of frames, or flat lists of whole frames. All other columns but binary ones go into
the sample's JSON.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.formats import common_folder, find_files, has_pattern
from torchtitan.models.dit_tts.prepare.formats.records import AUDIO_NAMES
from torchtitan.models.dit_tts.prepare.recordings import (
    KEY_NAMES,
    Item,
    ItemRules,
    Unusable,
    make_item,
    sample_key,
    split_of,
)
from torchtitan.models.dit_tts.prepare.tables import (
    LISTED_AT_ONCE,
    Table,
    column_names,
    rows_of,
)

SUFFIXES = (".parquet", ".arrow", ".feather")
# A folder's name up to its first sign or figure; `valentina` holds nothing out.
_SPLIT_FOLDERS = (
    "train training dev development val valid validation eval evaluation test testing held heldout"
).split()
LATENTS, REFERENCE = "latents", "reference"


class TableCorpus:
    """Its keys are the rows' own, or the file's name and the number of the row in it."""

    def __init__(self, source: str, rules: ItemRules):
        paths = find_files(source, SUFFIXES, below=True)
        if not paths:
            raise InputError(
                f"{source}: holds no {', '.join(SUFFIXES)} file; give a table, a folder or a glob"
            )
        self.rules = rules
        self.root = common_folder(paths)
        self.names = [os.path.relpath(path, self.root) for path in paths]
        base = _given_folder(source)
        self.splits = [_split_of_path(os.path.relpath(path, base)) for path in paths]
        self.self_contained = not any(_Columns(Table(path)).payload_is_path for path in paths)

    @classmethod
    def recognises(cls, source: str) -> bool:
        return bool(find_files(source, SUFFIXES, below=True))

    def files(self) -> list[str]:
        return list(self.names)

    def items(self) -> Iterator[Item | Unusable]:
        for name, split in zip(self.names, self.splits, strict=True):
            table = Table(os.path.join(self.root, name))
            columns = _Columns(table)
            number = 0
            for group in range(table.groups):
                row = 0
                for batch in table.batches(group, columns.listed, LISTED_AT_ONCE):
                    for values in rows_of(batch, table.path):
                        if split and not values.get("split"):
                            values["split"] = split
                        place = {"table": name, "group": group, "row": row}
                        yield self._item(name, number, columns, values, place)
                        row, number = row + 1, number + 1

    def _item(
        self,
        name: str,
        number: int,
        columns: "_Columns",
        values: dict[str, Any],
        place: dict[str, Any],
    ) -> Item | Unusable:
        given = next((str(values[n]) for n in KEY_NAMES if values.get(n) not in (None, "")), None)
        key = sample_key(given or f"{os.path.splitext(name)[0]}-{number:08d}")
        if columns.payload == LATENTS:
            place |= {"latents": LATENTS, "reference": columns.reference}
        elif columns.payload_is_path:
            path = values[columns.payload]
            if isinstance(path, dict):
                path = path.get("path")
            if not path:
                return Unusable(key, f"has no path in its column {columns.payload}")
            place = {"file": os.path.join(os.path.dirname(name), path)}
        else:
            place["column"] = columns.payload
        return make_item(values, key, place, self.rules)


class _Columns:
    """What the columns of a table are for, found once a table.

    Attributes:
        payload: the column of the audio or the latents.
        payload_is_path: it names files.
        reference: the column of the references, where there is one beside latents.
        listed: columns that are read to list the rows.
    """

    def __init__(self, table: Table):
        from pyarrow import types

        names = column_names(table)
        payload = (
            LATENTS if LATENTS in names else next((n for n in AUDIO_NAMES if n in names), None)
        )
        if payload is None:
            raise InputError(
                f"{table.path}: has the columns {', '.join(names)}; one of {LATENTS}, "
                f"{', '.join(AUDIO_NAMES)} is needed"
            )
        kind = names[payload]
        self.payload = payload
        self.payload_is_path = payload != LATENTS and (
            types.is_string(kind)
            or types.is_large_string(kind)
            or (types.is_struct(kind) and table.all_null(payload, "bytes"))
        )
        self.reference = REFERENCE if payload == LATENTS and REFERENCE in names else None
        heavy = {self.reference} | (set() if self.payload_is_path else {payload})
        binary = {
            n for n, kind in names.items() if types.is_binary(kind) or types.is_large_binary(kind)
        }
        self.listed = [n for n in names if n not in heavy and n not in binary]


def _given_folder(source: str) -> str:
    """The folder that the source names: itself, its file's, or the one before a pattern."""
    if has_pattern(source) and not os.path.exists(source):
        source = re.split(r"[*?\[{]", source)[0] + "pattern"
    return source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source))


def _split_of_path(path: str) -> str | None:
    """Hugging Face names the files after the split, `test-00000-of-00001`, or their folder."""
    *folders, name = path.split(os.sep)
    if split_of(name):
        return split_of(name)
    words = [re.split(r"[^a-z]", folder.lower())[0] for folder in reversed(folders)]
    return split_of(next((word for word in words if word in _SPLIT_FOLDERS), None))
