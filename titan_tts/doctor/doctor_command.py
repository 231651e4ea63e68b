"""`titan-tts data doctor`: reads a dataset and lists its faults."""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_tts.doctor.findings import Limits
from titan_tts.doctor.inspect_command import DatasetOptions, check_input
from torchtitan.models.dit_tts.errors import require, show
from torchtitan.models.dit_tts.files import SHARD_SUFFIX, is_remote, local_path

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.data.dataset import Dataset


@dataclass
class Options(DatasetOptions):
    """Read every sample of a dataset and report problems."""

    output: str = ""
    """HTML page; outputs/DATASET-doctor.html by default."""

    max_samples: int = 0
    """Read an even subset of this many samples only; 0: all."""

    limits: Limits = Limits()


def run(options: Options) -> int:
    from titan_tts.doctor.page import GENERATOR, doctor_page
    from titan_tts.report.page import check_page
    from torchtitan.models.dit_tts.data.dataset import open_dataset
    from torchtitan.models.dit_tts.text.normalize import Normalizer

    limits = options.limits
    check_input(options.path, limits.frames_per_second)
    unit, _, language = limits.text_unit.partition(":")
    require(
        limits.text_unit in ("bytes", "chars") or bool(unit == "phones" and language),
        f"--text-unit = {limits.text_unit!r} is not known; give bytes, chars or phones:LANGUAGE such as phones:en-us",
    )
    if language:
        from torchtitan.models.dit_tts.text.phones import Phonemizer

        Phonemizer(language)
    Normalizer(limits.normalize)
    # What would fail at the end fails before hours of reading.
    output = Path(options.output or default_output(options.path)).expanduser().absolute()
    check_page(output, "--output", GENERATOR)
    dataset = open_dataset(options.path, options.latent_channels, on_error="report")
    result = examine(dataset, options)
    result["page"] = str(output)
    page = doctor_page(result)
    page.write(output)
    show(page.json() if options.json else f"{page.text()}\n\npage: {output}")
    return int(result["status"] == "errors")


def default_output(paths: Sequence[str]) -> str:
    """outputs/data-train-doctor.html for /x/data/train: from the first path's last two names."""
    path = paths[0] if is_remote(paths[0]) else local_path(paths[0])
    parts = re.split(r"[/\\]+", path.removesuffix(SHARD_SUFFIX).strip("/"))
    name = re.sub(r"[^\w.-]+", "_", "-".join(parts[-2:])).strip("_.")
    return os.path.join("outputs", f"{name or 'data'}-doctor.html")


def examine(dataset: "Dataset", options: Options) -> dict[str, Any]:
    """The content of page and JSON."""
    from tqdm import tqdm

    from titan_tts.doctor.checks import check_dataset, measured_frame_rate
    from titan_tts.doctor.scan import READ, choose_samples, measure
    from titan_tts.doctor.summary import summarize

    limits, threads = options.limits, min(8, os.cpu_count() or 1)
    samples = choose_samples(len(dataset), options.max_samples)
    with tqdm(total=len(samples), desc="reading", unit=" samples", mininterval=1.0) as bar:
        measured = measure(dataset, samples, threads, bar.update)
    findings = check_dataset(dataset, measured, limits)
    worst = findings[0].severity if findings else "note"
    rate = measured_frame_rate(dataset, measured, limits.frames_per_second)
    return {
        "status": {"error": "errors", "warning": "warnings", "note": "healthy"}[worst],
        "summary": summarize(dataset, options.path, limits.frames_per_second, options.top),
        "read": {
            "samples": len(samples),
            "valid_samples": int((measured.rows["state"] == READ).sum()),
            "frames_per_second_measured": None if rate is None else round(rate, 4),
        },
        "findings": [asdict(finding) for finding in findings],
    }
