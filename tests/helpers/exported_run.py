"""A tiny run, exported."""

import json
from pathlib import Path
from typing import Any

from titan_tts.cli import main
from torchtitan.models.dit_tts.config.exported import files_read
from torchtitan.models.dit_tts.run.manifest import read_manifest, write_manifest

CONDITIONED = ["--data.conditioning=speaker", "--model.text_positions=aligned"]


def export(run: Path, out: Path, *arguments: str) -> Path:
    """The folder that `titan-tts export` writes."""
    assert main(["export", str(run), str(out), *arguments]) == 0
    return out


def as_by_a_stranger(folder: Path, name: str, content: Any) -> None:
    """Changes a JSON file of an exported folder, whose manifest is then of the changed file."""
    (folder / name).write_text(json.dumps(content))
    write_manifest(folder, files_read(folder), read_manifest(folder)["trained_with"])
