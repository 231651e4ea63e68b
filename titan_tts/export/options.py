"""Options of `titan-tts export`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro


@dataclass
class Options:
    """Write a trained model to a folder that needs neither its run nor its data, and publish it."""

    run: tyro.conf.Positional[str]
    """The run's folder, outputs/NAME."""

    out: tyro.conf.Positional[str]
    """Folder to write, a new or an empty one."""

    step: Annotated[int | Literal["best"] | None, tyro.conf.arg(metavar="INT|best")] = None
    """Checkpoint step, or best for the one that [validation] keep_best kept; the last by default."""

    weights: str = ""
    """raw, ema or ema:DECAY; by default those that generate takes: with the lowest held-out loss, else the
    slowest average."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of model.safetensors: as trained, or half its size."""

    voices: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """A speaker of the training shards whose reference is exported, too, for --speaker; may be repeated."""

    data: str = ""
    """Training shards, which lengths of texts and voices are taken from; the run's [data] path by default."""

    codec: str = ""
    """Where the codec is now; [sampling] codec of the run by default."""

    encoder: str = ""
    """Where a frozen text encoder is now; [encoder] model of the run by default."""

    license: str = "unknown"
    """Licence of the weights for the model card, such as apache-2.0."""

    push: str = ""
    """OWNER/NAME of a repository of the Hugging Face hub, to upload the folder to."""

    private: bool = False
    """A repository that --push makes is private."""
