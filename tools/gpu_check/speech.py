"""Stage: seconds of audio per second through the codec, by its own benchmark."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_check.items import Item, NotMeasured, Values
from tools.gpu_check.settings import ROOT, Settings


def run(script: str, arguments: list[str], output: Path, settings: Settings) -> dict[str, Any]:
    """The JSON that a benchmark writes."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--device", settings.device]
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=max(1.0, settings.deadline - time.time()),
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured("time: the stage's time was over before it had ended") from error
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        if "ModuleNotFoundError" in lines[-1]:
            raise NotMeasured(lines[-1])
        raise RuntimeError(f"{script} ended with status {done.returncode}: {lines[-1][:300]}")
    return json.loads(output.read_text())


def codec(settings: Settings) -> Values:
    output = settings.folder / "codec.json"
    sizes = ["--seconds=10", "--long-seconds=60", "--rounds=3", "--chunks", "10", "30"]
    if settings.tiny:
        sizes = ["--seconds=0.08", "--long-seconds=0.4", "--rounds=1", "--chunks", "0.2"]
    report = run("codec.py", [*sizes, "--output", str(output)], output, settings)
    values: Values = {}
    for way in ("encode", "decode"):
        by_size = report["batches"][way]
        largest = max(by_size, key=int)
        rate = by_size[largest]["audio_seconds_a_second"]["median"]
        values[f"{way}_audio_seconds_per_second"] = rate
    report.pop("environment", None)
    return {**values, "samples": int(largest), "report": report}


def items(settings: Settings) -> list[Item]:
    return [
        Item("codec", partial(codec, settings), 3.0),
    ]
