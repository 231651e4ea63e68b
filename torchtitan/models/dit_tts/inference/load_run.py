"""A trained run's model, from its folder: the resolved config and a checkpoint's averaged weights."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import FlowMatching, build_objective
from torchtitan.models.dit_tts.infra.checkpoint_storage import (
    checkpoint_steps,
    load_checkpoint,
    read_manifest,
    read_table,
    verify,
)
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.text.build_tokenizer import load_tokenizer
from torchtitan.models.dit_tts.text.encoder_record import load_run_encoder
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer
from torchtitan.tools.utils import device_type


@dataclass(frozen=True)
class LoadedRun:
    """A run as generation uses it. The model is in eval mode."""

    folder: Path
    config: JobConfig
    model: DiTTTSModel
    text_encoder: PretrainedTextEncoder | None
    """frozen, outside the model"""

    tokenizer: ConditionedTokenizer
    objective: FlowMatching
    step: int
    device: torch.device


def untrained_model(run: LoadedRun) -> DiTTTSModel:
    """The run's model with the weights that training started from (same seed); a text encoder inside
    it has what it has learned."""
    model = _empty_model(run.config, run.folder, run.device)
    if run.config.debug.seed is not None:
        torch.manual_seed(run.config.debug.seed)
    with torch.no_grad():
        model.init_weights()
    if isinstance(model.text_encoder, PretrainedTextEncoder):
        assert isinstance(run.model.text_encoder, PretrainedTextEncoder)
        model.text_encoder.load_state_dict(run.model.text_encoder.state_dict())
    return model


def _empty_model(config: JobConfig, folder: Path, device: torch.device) -> DiTTTSModel:
    """The run's model in eval mode, its weights arbitrary."""
    args = model_flavors()[config.model.flavor]
    args.update_from_config(config, folder=folder)
    # The run's own may need what sampling is without: flex compiled blocks, varlen bfloat16.
    args.attention = "sdpa"
    with torch.device("meta"):
        model = DiTTTSModel(args)
    model.to_empty(device=device)
    if isinstance(model.text_encoder, PretrainedTextEncoder):
        model.text_encoder.reset_buffers()
    return model.eval()


def _apply(trained_with: dict[str, Any], config: JobConfig) -> None:
    """Sets what the weights were trained with, as a later start may have been allowed to change it."""
    for key, value in trained_with.items():
        section, _, name = key.partition(".")
        if section in ("objective", "model"):
            setattr(getattr(config, section), name, value)


def load_run(
    folder: str | Path, step: int | None = None, use_ema: bool = True, encoder: str = ""
) -> LoadedRun:
    """Load a run's model; by default the averaged weights of its last checkpoint.

    Args:
        folder: the run's.
        step: of the checkpoint; None: the last.
        use_ema: the averaged weights, not the trained ones.
        encoder: where the frozen text encoder is now; by default where it was.

    Raises:
        InputError: no run, no such checkpoint, no averaged weights in it, or a tokenizer or text
            encoder that is not the run's.
    """
    folder = Path(folder)
    config = load_run_config(folder)
    checkpoints = folder / config.checkpoint.folder
    steps = checkpoint_steps(checkpoints)
    if not steps:
        raise InputError(f"{checkpoints} has no complete checkpoint; train the run further first")
    if step is not None and step not in steps:
        found = ", ".join(map(str, steps))
        raise InputError(f"{checkpoints} has no checkpoint step-{step}; it has steps: {found}")
    step = steps[-1] if step is None else step
    path = checkpoints / f"step-{step}"
    if problem := verify(path):
        raise InputError(f"{problem}; give another --step, of: {', '.join(map(str, steps))}")
    _apply(read_manifest(path)["trained_with"], config)
    device = torch.device(device_type)
    tokenizer = load_tokenizer(folder, config)
    config.encoder.vocab_size = tokenizer.vocab_size
    model = _empty_model(config, folder, device)
    weights = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    saved = read_table(path).state_dict_metadata
    if use_ema and not any(name.startswith("ema.") for name in saved):
        raise InputError(
            f"{path} holds no averaged weights (the run had [ema] enable = false or saved the model "
            f"only); load the trained ones with --no-ema"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_checkpoint({"ema": weights} if use_ema else weights, path, no_dist=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    text_encoder = None
    if is_pretrained(config.encoder.model) and config.encoder.frozen:
        there = replace(config.encoder, model=encoder or config.encoder.model)
        text_encoder = load_run_encoder(folder, there, device)
    return LoadedRun(
        folder, config, model, text_encoder, tokenizer, build_objective(config), step, device
    )
