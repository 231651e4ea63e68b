"""The stages, their fractions of the time, and what a check is asked to do."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    name: str
    fraction: float
    """of the check's time, relative to the others'; what a stage leaves goes to those after it"""

    summary: str


STAGES = (
    Stage("environment", 15, "device, driver, versions, clocks, power limit, free memory"),
    Stage("numerics", 90, "outputs and gradients against float64 on the CPU"),
    Stage("ceilings", 30, "rates of products, attention and memory"),
    Stage("block", 50, "one decoder block forward and backward in each mode"),
    Stage("steps", 230, "whole training steps over micro-batches"),
    Stage("sampling", 50, "latents for 1 and 16 requests, eager and compiled"),
    Stage("goodput", 110, "mixed lengths, packed and in buckets, against the longest only"),
    Stage("resume", 50, "a killed and resumed run against an unbroken one"),
    Stage("speech", 40, "codec throughput"),
)


@dataclass(frozen=True)
class Settings:
    """Settings that every stage's process gets."""

    device: str
    """cuda or cpu"""

    tiny: bool
    """small sizes that a CPU runs in minutes: whether everything works, not how fast"""

    work: str
    """folder of runs, logs and compiled kernels"""

    flavors: tuple[str, ...]
    """sizes whose products, blocks and steps are measured"""

    micro_batches: tuple[int, ...]
    """samples of full length in a micro-batch, in the order they are tried; empty: each flavor's own"""

    deadline: float = 0.0
    """moment (time.time()) from which on the stage starts nothing new"""

    @property
    def folder(self) -> Path:
        return Path(self.work)

    def write(self, path: Path, deadline: float) -> None:
        path.write_text(json.dumps(asdict(replace(self, deadline=deadline))))


def read_settings(path: Path) -> Settings:
    content = json.loads(path.read_text())
    for name in ("flavors", "micro_batches"):
        content[name] = tuple(content[name])
    return Settings(**content)
