"""What Echo-TTS and Irodori-TTS are beside their weights: sizes, texts, lengths, sampling, codec."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig, model_flavors, write_sizes

_FLAVOR = "800M"
"""to which [model] sizes of a converted model is the difference"""


@dataclass(frozen=True)
class Project:
    """A project whose models have this family's blocks."""

    name: str
    file: str
    """of the weights in its folders, and on the hub"""

    convention: Literal["echo"]
    bidirectional: bool
    max_frames: int
    max_speaker_frames: int
    max_text_tokens: int
    speaker_scale: float
    bytes_per_second: float
    """of a text, about: where long texts are split"""

    licence: str
    left_out: tuple[str, ...] = ()
    """parts of the names of tensors that are not converted"""


ECHO = Project(
    name="Echo-TTS",
    file="pytorch_model.safetensors",
    convention="echo",
    bidirectional=False,
    max_frames=640,
    max_speaker_frames=6400,
    max_text_tokens=768,
    speaker_scale=8.0,
    bytes_per_second=16.0,
    licence="CC-BY-NC-SA-4.0, its codec's too",
    # Of generation block by block, which this family has not.
    left_out=("latent_encoder.", "latent_norm.", ".wk_latent.", ".wv_latent."),
)
PROJECTS = {"echo": ECHO}


def sizes_of(weights: Mapping[str, Tensor], project: Project, where: Path) -> DiTTTSModelConfig:
    """The sizes of a model by the shapes of its tensors."""

    def shape(name: str) -> torch.Size:
        if name not in weights or weights[name].ndim != 2:
            raise InputError(
                f"{where} holds no weights of {project.name}: {name} is missing or no matrix"
            )
        return weights[name].shape

    def blocks(prefix: str) -> int:
        numbers = {key.split(".")[prefix.count(".")] for key in weights if key.startswith(prefix)}
        return len(numbers)

    dim, channels = shape("in_proj.weight")
    speaker_dim, patch = shape("speaker_encoder.in_proj.weight")
    text_dim = shape("text_encoder.text_embedding.weight")[1]
    first = "blocks.0"
    text, speaker = "text_encoder.blocks.0", "speaker_encoder.blocks.0"
    heads = shape(f"{first}.attention.q_norm.weight")[0]
    require(
        heads % 2 == 0,
        f"{where} has {heads} heads, of which {project.name} rotates the larger half and this family the smaller; only "
        f"an even number can be converted",
    )
    return replace(
        model_flavors()[_FLAVOR],
        dim=dim,
        n_layers=blocks("blocks."),
        n_heads=heads,
        mlp_dim=shape(f"{first}.mlp.w1.weight")[0],
        adaln_rank=shape(f"{first}.attention_adaln.shift_down.weight")[0],
        timestep_dim=shape("cond_module.0.weight")[1],
        speaker_dim=speaker_dim,
        speaker_n_layers=blocks("speaker_encoder.blocks."),
        speaker_n_heads=shape(f"{speaker}.attention.q_norm.weight")[0],
        speaker_mlp_dim=shape(f"{speaker}.mlp.w1.weight")[0],
        speaker_patch_size=patch // channels,
        speaker_partial_patches=False,
        speaker_bidirectional=project.bidirectional,
        latent_channels=channels,
        text_dim=text_dim,
        text_n_layers=blocks("text_encoder.blocks."),
        text_n_heads=shape(f"{text}.attention.q_norm.weight")[0],
        text_mlp_dim=shape(f"{text}.mlp.w1.weight")[0],
        text_projection=False,
        norm_eps=1e-5,
    )


def config_of(args: DiTTTSModelConfig, project: Project) -> JobConfig:
    """The config of a run that had trained the model, as far as it is known; codec and rate of its latents are not
    in it. `args`: of `sizes_of`."""
    config = JobConfig()
    model, data, encoder = config.model, config.data, config.encoder
    model.flavor, model.sizes = _FLAVOR, write_sizes(args, _FLAVOR)
    data.latent_channels, data.speaker_patch_size = args.latent_channels, args.speaker_patch_size
    data.max_frames, data.max_speaker_frames = project.max_frames, project.max_speaker_frames
    data.max_text_tokens = project.max_text_tokens
    # Rows of one length: where the speech ends is learned from the zeros behind it.
    data.num_buckets, data.bucket_frames = 1, [project.max_frames]
    config.objective.loss_on_padding = True
    encoder.model, encoder.convention = "bytes", project.convention
    encoder.dim, encoder.n_layers = args.text_dim, args.text_n_layers
    encoder.n_heads = args.text_n_heads
    config.sampling = replace(
        config.sampling, start_t=0.999, text_scale=3.0, speaker_scale=project.speaker_scale
    )
    config.optimizer.lr = 1e-4
    return config


_SAME: dict[str, Any] = {
    "model.text_positions": "none",
    "objective.prediction": "velocity",
    "encoder.added_tokens": [],
    "data.conditioning": [],
}
"""Keys that a model must have so to be one of the projects'"""


def check_is_of(config: JobConfig, args: DiTTTSModelConfig, project: Project, where: Path) -> None:
    """Raises InputError where a model's forward pass is not the project's."""
    as_theirs = {
        **_SAME,
        "encoder.convention": project.convention,
    }
    found: dict[str, Any] = {}
    for key in as_theirs:
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(config, section), name)
    for name, value in (
        ("norm_eps", 1e-5),
        ("rope_theta", 10000.0),
        ("text_projection", False),
        ("speaker_partial_patches", False),
        ("speaker_bidirectional", project.bidirectional),
    ):
        as_theirs[f"model.sizes: {name}"], found[f"model.sizes: {name}"] = (
            value,
            getattr(args, name),
        )
    for key, value in as_theirs.items():
        require(
            found[key] == value,
            f"{where} has {key} = {found[key]!r}, but a model of {project.name} has {value!r}; it can only be used with "
            f"titan-tts",
        )
