"""A tiny run, exported."""

from pathlib import Path

from torchtitan.models.dit_tts.cli import main


def export(run: Path, out: Path, *arguments: str) -> Path:
    """The folder that `titan-tts export` writes."""
    assert main(["export", str(run), str(out), *arguments]) == 0
    return out
