"""Options of `titan-tts export`."""

from dataclasses import dataclass, field
from typing import Literal

import tyro

from titan_tts.speak.sampling_options import ModelOptions


@dataclass(kw_only=True)
class Options(ModelOptions):
    """Write a trained model to a folder that needs neither its run nor its data."""

    run: tyro.conf.Positional[str]
    """The run's folder, outputs/NAME."""

    out: tyro.conf.Positional[str]
    """Folder to write, a new or an empty one."""

    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of the weights: float32 as trained, or bfloat16 of half its size; of --onnx float32 or int8."""

    voices: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """A speaker of the training shards whose reference is exported, too, for --speaker; may be repeated. The first speaks
    where no voice is named."""

    adapter: bool = False
    """Write what an adapter's run has trained alone, some megabytes that `titan-tts serve --voice` adds to its base."""

    onnx: bool = False
    """Write graphs for onnxruntime, by which titan_tts.onnx_voice speaks without torch; RUN may be an exported folder, too,
    or titan_tts:NAME, whose voices are all exported without --voices."""

    duration: str = ""
    """Folder of a length predictor, or of a model that has one and the same text units, such as titan_tts:base for what
    began with it; fit: none; by default the one in the run's folder or next to it (duration/)."""

    license: str = "unknown"
    """Licence of the weights for the model card, such as apache-2.0."""
