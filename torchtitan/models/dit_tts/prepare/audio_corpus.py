"""Read the recordings of an audio-WebDataset tar one after another, as they are.

For tools that listen to a corpus; preparing one goes through ``pipeline``. See ``formats/webdataset``
for the layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.audio import to_mono
from torchtitan.models.dit_tts.prepare.audio_reader import Loader
from torchtitan.models.dit_tts.prepare.formats import open_corpus
from torchtitan.models.dit_tts.prepare.listing import Plan, usable_items
from torchtitan.models.dit_tts.prepare.recordings import ItemRules


@dataclass(frozen=True)
class Utterance:
    """One recording with what is known about it."""

    key: str
    waveform: Tensor  # (samples,) float32 in [-1, 1], the mean of the channels
    sample_rate: int  # Hz
    text: str
    speaker: str
    split: str  # "train" or "heldout"
    metadata: dict[str, Any]


def read_audio_corpus(path: str | Path) -> Iterator[Utterance]:
    """Yield the recordings of a corpus tar in their order, one in memory at a time.

    Raises:
        InputError: no such file, or a recording or tar that is damaged or incomplete.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}: no such corpus file; give the path of a tar of KEY.opus + KEY.json"
        )
    reader = open_corpus(str(path), "webdataset", ItemRules())
    loader = Loader(reader.root)
    try:
        for item in usable_items(reader, str(path), "raise", Plan()):
            try:
                recording = loader.load(item.audio, 0)
            except InputError as error:
                raise InputError(f"{path}: {item.key}: {error}; replace it") from None
            yield Utterance(
                item.key,
                torch.from_numpy(to_mono(recording.samples)),
                recording.rate,
                item.text,
                item.speaker,
                item.split,
                item.metadata,
            )
    finally:
        loader.close()
