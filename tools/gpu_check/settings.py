"""What every process of the check is told."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    device: str
    """cuda or cpu"""

    tiny: bool
    """small sizes that a CPU runs in minutes: whether everything works, not how fast"""

    work: str
    """folder of rows, runs, logs and compiled kernels"""

    groups: tuple[str, ...]
    """what is measured, in this order"""

    flavors: tuple[str, ...]
    """sizes whose products, blocks and steps are measured"""

    micro_batch: int = 0
    """samples of full length in a micro-batch of a step; 0: each flavor's own"""

    only: str = ""
    """a part of the names of the items that are measured; empty: all"""

    @property
    def folder(self) -> Path:
        return Path(self.work)

    def write(self) -> Path:
        path = self.folder / "settings.json"
        path.write_text(json.dumps(asdict(self)))
        return path


def read_settings(path: Path) -> Settings:
    content = json.loads(path.read_text())
    for name in ("flavors", "groups"):
        content[name] = tuple(content[name])
    return Settings(**content)
