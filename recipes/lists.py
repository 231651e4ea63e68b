"""Lists of recordings, as recipes and benchmarks make them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.files import write_atomic


def write_list(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a list for `titan-tts prepare`, unless it is there: a list that is newer is another source."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not path.is_file() or path.read_text("utf-8") != lines:
        write_atomic(path, lines)
