"""Keeps a report of a bad step."""

import json
import math
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.infra.collectives import gather_from_ranks
from torchtitan.models.dit_tts.infra.divergence import StepStats


def save_bad_step(run_folder: Path, loader: LatentDataLoader, bad: StepStats) -> Path:
    """Loads a bad step's batch again and writes `divergence/step-N-batch-M/report.json`, with the step's figures and
    every sample, the largest latents first. A collective. Returns the folder."""
    folder = run_folder / "divergence" / f"step-{bad.step}-batch-{bad.global_batch}"
    rank = dist.get_rank()
    samples: list[dict[str, Any]] = []
    try:
        for batch, _ in loader.micro_batches(bad.global_batch):
            lengths = batch["frames"].tolist()[: len(batch["sample_id"])]
            latents = batch["latents"]
            parts = latents[0, : sum(lengths)].split(lengths) if "longest" in batch else latents
            for name, frames, part in zip(batch["sample_id"], lengths, parts, strict=True):
                peak = float(part.abs().max())
                row = {"id": name, "rank": rank, "frames": frames, "max_abs": _number(peak)}
                samples.append(row)
    except (InputError, OSError, RuntimeError) as error:  # the other ranks wait for this one
        logger.error(f"the batch of {folder.name} could not be read again ({error})")
    every = [row for rows in gather_from_ranks(samples) for row in rows]
    every.sort(key=lambda row: -float(row["max_abs"]) if row["max_abs"] != "nan" else -math.inf)
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stats = {name: _number(value) for name, value in vars(bad).items()}
            report = json.dumps({**stats, "samples": every}, indent=1)
            write_atomic(folder / "report.json", report + "\n")
        except OSError as error:
            logger.error(f"{folder}: the bad step's report could not be written ({error})")
    return folder


def _number(value: Any) -> Any:
    """JSON has no nan and no inf: they become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
