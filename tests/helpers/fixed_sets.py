"""Datasets and sets of fixed batches that are small enough to compute by hand."""

from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.dataset import Dataset, open_training_data
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary
from torchtitan.models.dit_tts.validation.fixed_batches import FixedSet

CHANNELS = 4
CONDITIONS = Vocabulary(
    conditioning={"speaker": ("ann", "bob"), "duration": tuple("0123456789")},
    duration_token_seconds=0.2,
)

Row = tuple[str, str | None, int, int]
"""(text, speaker, latent frames, frames of the reference)"""

HELDOUT: list[Row] = [
    ("one", "ann", 20, 6),
    ("two three", "bob", 9, 7),
    ("four", "ann", 12, 0),
    ("five", "eve", 20, 16),
    ("six", "bob", 31, 3),
]


def write_rows(folder: Path, rows: list[Row], **metadata: Any) -> Path:
    """One shard of samples utt0, utt1 ... with random latents."""
    generator = np.random.default_rng(1)
    samples = []
    for number, (text, speaker, frames, reference) in enumerate(rows):
        arrays = [
            generator.standard_normal((length, CHANNELS)).astype(np.float16)
            for length in (frames, reference)
        ]
        labels = {"speaker": speaker} if speaker is not None else {}
        samples.append(Triplet(f"utt{number}", *arrays, {"text": text, **labels, **metadata}))
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "000000.tar", samples)
    return folder


def data_section(folder: Path, **changes: Any) -> Data:
    """[data] of runs on these samples."""
    defaults = {"path": str(folder), "latent_channels": CHANNELS, "max_frames": 32}
    limits = {"max_speaker_frames": 16, "max_text_tokens": 40, "speaker_patch_size": 4}
    return Data(**(defaults | limits | changes))


def fixed_set(
    folder: Path,
    count: int = 64,
    batch_size: int = 4,
    tokenizer: UnitTokenizer | None = None,
    whole_rows: bool = False,
    **changes: Any,
) -> FixedSet:
    data = data_section(folder, **changes)
    dataset: Dataset = open_training_data(data)
    tokenizer = tokenizer or UnitTokenizer(CONDITIONS)
    return FixedSet(dataset, data, tokenizer, count, batch_size, whole_rows)
