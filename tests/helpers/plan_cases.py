"""What tests of plans share: a small config, and the passes that they measure."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from tests.helpers.small_models import full_inputs
from titan_tts.plan.devices import find_device
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths

DEBUG = Path(__file__).resolve().parents[2] / "train_configs/debug.toml"
H200 = find_device("H200")
SMALL = ["--data.max_frames=64", "--data.num_buckets=2", "--encoder.n_layers=1"]
SMALL += ["--training.mixed_precision_param=bfloat16"]
SMALL += ["--compile.components=model"]  # each stack takes seconds to compile


def debug_config(*arguments: str, **sections: dict):
    """The debug config with short batches."""
    return shipped_debug_config(*SMALL, *arguments, **sections)


def shipped_debug_config(*arguments: str, **sections: dict):
    config = load_config([f"--job.config_file={DEBUG}", *arguments])
    for section, values in sections.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return config


# Sections that a pass does not depend on, or only by its other arguments.
_NO_PART = {
    *("job", "benchmark", "checkpoint", "metrics", "lr_scheduler", "optimizer", "data", "compile"),
    *("parallelism", "training", "activation_checkpoint"),
}


class RememberedPasses:
    """In place of `activations.measure`: runs each pass over tensors without data once for all tests of
    this process. A pass takes a second or, where a block is compiled first, several."""

    def __init__(self, measure: Any):
        self._measure = measure
        self._known: dict[str, tuple[Any, Any]] = {}

    def __call__(self, config, args, samples, lengths, checkpointing, *, compiler=None, **options):
        names = [field.name for field in fields(config) if field.name not in _NO_PART]
        key = repr(
            (
                [getattr(config, name) for name in names],
                (config.training.dtype, config.training.mixed_precision_param),
                config.parallelism.tensor_parallel_degree,
                (args, samples, lengths, checkpointing, options),
                compiler and (compiler.components, vars(compiler.decoder)["keeps_products"]),
                compiler and vars(compiler.decoder)["_budget"],
            )
        )
        if key not in self._known:
            shape = samples, lengths
            options |= {"compiler": compiler}
            found = self._measure(config, args, *shape, checkpointing, **options)
            self._known[key] = found, compiler and compiler.decoder.graphs
        found, graphs = self._known[key]
        if compiler is not None:
            compiler.decoder.graphs = graphs
        return found


LENGTHS = Lengths(frames=40, text_tokens=24, speaker_frames=16)
SAMPLES = 3


def random_inputs() -> dict[str, torch.Tensor]:
    """What the debug model is called with: `SAMPLES` samples of `LENGTHS`."""
    sizes = SAMPLES, LENGTHS.frames, LENGTHS.text_tokens, LENGTHS.speaker_frames
    keep = {name: torch.ones(SAMPLES, dtype=torch.bool) for name in ("keep_text", "keep_speaker")}
    return full_inputs(DiTTTSModelArgs(latent_channels=128), *sizes) | keep
