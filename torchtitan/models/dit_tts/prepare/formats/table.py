"""Parquet and Arrow tables: a row a recording, or a row an utterance that is encoded already.

Audio is a column `audio` (or another of its names): Hugging Face's struct of bytes and path, bytes,
or a path relative to the table. Ready latents are a column `latents`, and a `reference` where there
is one: lists of frames, or flat lists of whole frames. All other columns but binary ones go into
the sample's JSON.
"""

import os
from collections.abc import Iterator
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.formats import common_folder, find_files
from torchtitan.models.dit_tts.prepare.formats.manifest import AUDIO_NAMES
from torchtitan.models.dit_tts.prepare.items import (
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
)

SUFFIXES = (".parquet", ".arrow", ".feather")
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
        tables = map(Table, paths)
        self.self_contained = not any(
            self._columns(table)[0] in self._path_columns(table) for table in tables
        )

    @classmethod
    def recognises(cls, source: str) -> bool:
        return bool(find_files(source, SUFFIXES, below=True))

    def files(self) -> list[str]:
        return list(self.names)

    def items(self) -> Iterator[Item | Unusable]:
        for name in self.names:
            table = Table(os.path.join(self.root, name))
            payload, listed = self._columns(table)
            split = split_of(os.path.basename(name))
            number = 0
            for group in range(table.groups):
                row = 0
                for batch in table.batches(group, listed, LISTED_AT_ONCE):
                    for columns in batch.to_pylist():
                        if split and not columns.get("split"):
                            # Hugging Face names its files after the split.
                            columns["split"] = split
                        place = {"table": name, "group": group, "row": row}
                        yield self._item(table, name, number, payload, columns, place)
                        row, number = row + 1, number + 1

    def _item(
        self,
        table: Table,
        name: str,
        number: int,
        payload: str,
        columns: dict[str, Any],
        place: dict[str, Any],
    ) -> Item | Unusable:
        given = next((str(columns[n]) for n in KEY_NAMES if columns.get(n) not in (None, "")), None)
        key = sample_key(given or f"{os.path.splitext(name)[0]}-{number:08d}")
        if payload == LATENTS:
            reference = REFERENCE if REFERENCE in column_names(table) else None
            place |= {"latents": LATENTS, "reference": reference}
        elif payload in self._path_columns(table):
            path = columns[payload]
            if isinstance(path, dict):
                path = path.get("path")
            if not path:
                return Unusable(key, f"has no path in its column {payload}")
            place = {"file": os.path.join(os.path.dirname(name), path)}
        else:
            place["column"] = payload
        return make_item(columns, key, place, self.rules)

    def _columns(self, table: Table) -> tuple[str, list[str]]:
        """(column of the audio or the latents, columns to list)."""
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
        heavy = {REFERENCE} if payload == LATENTS else set()
        if payload not in self._path_columns(table):
            heavy.add(payload)
        binary = {
            n for n, kind in names.items() if types.is_binary(kind) or types.is_large_binary(kind)
        }
        return payload, [n for n in names if n not in heavy and n not in binary]

    @staticmethod
    def _path_columns(table: Table) -> set[str]:
        """Columns that name files."""
        from pyarrow import types

        return {
            name
            for name, kind in column_names(table).items()
            if name in AUDIO_NAMES
            and (
                types.is_string(kind)
                or types.is_large_string(kind)
                or (types.is_struct(kind) and table.all_null(name, "bytes"))
            )
        }
