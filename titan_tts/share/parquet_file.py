"""Writes a shard's samples as a Parquet file, one row per sample:

    key                        string
    frames, reference_frames   int32    rows of the arrays
    latents, reference         binary   float16 or float32 (rows, width), little-endian: KEY.npy behind its header
    metadata                   string   KEY.json

No column is compressed or dictionary-encoded, because float16 latents hardly compress. The schema's metadata has
`titan_tts.channels`, the width of the latents, and may have `titan_tts.shard_bytes`, the size of the tar.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.files import atomic_file

_GROUP_BYTES = 32 << 20
"""of rows that are in memory at once and become one row group"""


def write_parquet_file(
    path: str | Path, rows: Iterable[dict[str, Any]], channels: int, shard_bytes: int | None = None
) -> None:
    """Writes rows of the columns; the file is complete or absent. `shard_bytes`: size of the tar that holds the same
    samples; None where there is no such tar."""
    import pyarrow  # takes long to import, and audio exports do not need it
    import pyarrow.parquet

    from titan_tts.prepare.formats.table import shard_schema

    stored = {b"titan_tts.channels": b"%d" % channels}
    if shard_bytes is not None:
        stored[b"titan_tts.shard_bytes"] = b"%d" % shard_bytes
    schema = shard_schema().with_metadata(stored)
    with (
        atomic_file(path) as file,
        pyarrow.parquet.ParquetWriter(
            file, schema, compression="none", use_dictionary=False, write_statistics=False
        ) as writer,
    ):
        group: list[dict[str, Any]] = []
        size = 0
        for row in rows:
            group.append(row)
            size += sum(len(row[array.name]) for array in members.ARRAYS)
            if size >= _GROUP_BYTES:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group, size = [], 0
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))
