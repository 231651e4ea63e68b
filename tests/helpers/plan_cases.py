"""What the tests of plans share: a small config, a forecaster for it, and the passes that they measure."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.plan.constants import guesses
from torchtitan.models.dit_tts.plan.devices import cluster_of, find_device
from torchtitan.models.dit_tts.plan.forecast import Forecaster
from torchtitan.models.dit_tts.plan.operations import OperationRecorder

DEBUG = Path(__file__).resolve().parents[2] / "train_configs/debug.toml"
H200 = find_device("H200")
SMALL = [
    "--data.max_frames=64",
    "--data.num_buckets=2",
    "--training.mixed_precision_param=bfloat16",
    "--encoder.n_layers=1",
    "--compile.components=model",  # each stack takes seconds to compile
]


def debug_config(*arguments: str):
    return load_config([f"--job.config_file={DEBUG}", *SMALL, *arguments])


def forecaster(config, gpus: int = 1, device=H200, *, shorter: bool = False) -> Forecaster:
    return Forecaster(config, cluster_of(device, gpus, gpus), guesses(), shorter=shorter)


# Sections that a pass does not depend on, or only by its other arguments.
_NO_PART = (
    "job",
    "benchmark",
    "checkpoint",
    "metrics",
    "lr_scheduler",
    "optimizer",
    "data",
    "compile",
)
_NO_PART += ("parallelism",)


class RememberedPasses:
    """In place of `activations.measure`: runs each pass over tensors without data once for all tests of
    this process. A pass takes a second or, where a block is compiled first, several."""

    def __init__(self, measure: Any):
        self._measure = measure
        self._known: dict[str, tuple[Any, Any]] = {}

    def __call__(self, config, args, samples, lengths, checkpointing, **options):
        compiler, recorder = options.pop("compiler", None), options.pop("recorder", None)
        sections = {field.name: getattr(config, field.name) for field in fields(config)}
        for name in _NO_PART:
            del sections[name]
        training = sections.pop("training")
        # How blocks are checkpointed is an argument.
        sections["activation_checkpoint"] = replace(
            config.activation_checkpoint, mode="none", selective_ac_option="op"
        )
        key = repr(
            (
                sections,
                (training.dtype, training.mixed_precision_param),
                (args, samples, lengths, checkpointing, options),
                compiler and (compiler.decoder, compiler._components, compiler._options),
            )
        )
        if key not in self._known:
            own = OperationRecorder()
            options |= {"compiler": compiler, "recorder": own}
            found = self._measure(config, args, samples, lengths, checkpointing, **options)
            self._known[key] = found, own.operations()
        found, operations = self._known[key]
        if recorder is not None:
            recorder.operations = lambda: operations
        return found
