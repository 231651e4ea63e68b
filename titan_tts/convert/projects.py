"""Echo-TTS and Irodori-TTS apart from their weights: sizes, texts, lengths, sampling, codec."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.models.dit_tts.config.job_config import LEARNED_SUBWORDS, JobConfig
from torchtitan.models.dit_tts.config.keys import check_numbers
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig, model_flavors, write_sizes

_FLAVOR = "800M"
"""to which [model] sizes of a converted model is the difference"""

_CAPTION_SCALE = 3.0
"""Irodori-TTS's guidance towards a caption"""

Header = Mapping[str, Any]
"""Irodori-TTS's config, which the header of its file has; empty for Echo-TTS"""


@dataclass(frozen=True)
class Project:
    """A project whose models have this family's blocks."""

    name: str
    file: str
    """of the weights in its folders, and on the hub"""

    convention: Literal["echo", "irodori"]
    bidirectional: bool
    max_frames: int
    max_speaker_frames: int
    max_text_tokens: int
    speaker_scale: float
    bytes_per_second: float
    """of a text, about: where long texts are split"""

    licence: str
    audio: dict[str, float | None] = field(default_factory=dict)
    """how references are treated before the codec"""

    codecs: dict[int, str] = field(default_factory=dict)
    """hub name by the number of channels; none: a user's function"""

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
    licence="CC-BY-NC-SA-4.0, as its codec's",
    audio={"loudness": None, "max_silence": None},
    # Block-by-block generation, which this model does not support.
    left_out=(".latent_encoder.", ".latent_norm.", ".wk_latent.", ".wv_latent."),
)
IRODORI = Project(
    name="Irodori-TTS",
    file="model.safetensors",
    convention="irodori",
    bidirectional=True,
    max_frames=750,
    max_speaker_frames=750,
    max_text_tokens=256,
    speaker_scale=5.0,
    bytes_per_second=21.0,
    licence="see its model card",
    audio={"loudness": -16.0, "max_silence": None},
    codecs={32: "Aratako/Semantic-DACVAE-Japanese-32dim", 128: "facebook/dacvae-watermarked"},
)
PROJECTS = {"echo": ECHO, "irodori": IRODORI}


def sizes_of(
    weights: Mapping[str, Tensor], header: Header, project: Project, where: Path
) -> DiTTTSModelConfig:
    """The sizes of a model by the shapes of its tensors. Raises InputError for what this family does not support."""
    _check_version(weights, header, where)
    stacked = header.get("latent_patch_size", 1)
    found = (
        f"{where} has latent_patch_size = {stacked!r} in its config: frames stacked in the decoder"
    )
    require(stacked == 1, f"{found}, which no model here has")

    def shape(name: str) -> torch.Size:
        if name not in weights or weights[name].ndim != 2 or not weights[name].numel():
            raise InputError(
                f"{where} holds no weights of {project.name}: {name} is missing or no matrix; models of other projects, such "
                "as F5-TTS, cannot be read"
            )
        return weights[name].shape

    def block(prefix: str) -> dict[str, int]:
        """Sizes of an encoder or of the decoder."""
        rest = [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]
        return {
            "n_layers": len({name.partition(".")[0] for name in rest}),
            "n_heads": shape(f"{prefix}0.attention.q_norm.weight")[0],
            "mlp_dim": shape(f"{prefix}0.mlp.w1.weight")[0],
        }

    def of_encoder(name: str) -> dict[str, int]:
        return {f"{name}_{key}": value for key, value in block(f"{name}_encoder.blocks.").items()}

    dim, channels = shape("in_proj.weight")
    voice: dict[str, Any]
    if entry(header, "use_caption_condition", False):  # in place of a reference
        own = block("caption_encoder.blocks.")
        ids, width = shape("caption_encoder.text_embedding.weight")
        voice = {f"speaker_{key}": own[key] for key in ("n_heads", "mlp_dim")}
        voice |= {"caption_n_layers": own["n_layers"], "speaker_dim": width}
        voice |= {"speaker_reference": False, "speaker_patch_size": 1}
        same = {
            "caption_tokenizer_repo": header.get("text_tokenizer_repo"),
            "caption_add_bos": True,
        }
        require(
            ids == shape("text_encoder.text_embedding.weight")[0]
            and all(header.get(key) in (None, value) for key, value in same.items()),
            f"{where} reads captions by another tokenizer than texts, which no model here does",
        )
    else:
        width, patch = shape("speaker_encoder.in_proj.weight")
        voice = of_encoder("speaker")
        voice |= {"speaker_dim": width, "speaker_patch_size": patch // channels}
    sizes: dict[str, Any] = {
        **block("blocks."),
        **voice,
        **of_encoder("text"),
        **_rules(header, project),
        "dim": dim,
        "adaln_rank": shape("blocks.0.attention_adaln.shift_down.weight")[0],
        "timestep_dim": shape("cond_module.0.weight")[1],
        "latent_channels": channels,
        "text_dim": shape("text_encoder.text_embedding.weight")[1],
    }
    model = replace(model_flavors()[_FLAVOR], **sizes)
    # Of an odd number they rotate the larger half, this family the smaller.
    even = "only an even number can be converted"
    require(model.n_heads % 2 == 0, f"{where} has {model.n_heads} heads; {even}")
    return model


def _check_version(weights: Mapping[str, Tensor], header: Header, where: Path) -> None:
    """Raises InputError for Irodori-TTS's versions whose network is different."""
    predicts = any(name.startswith("duration_predictor.") for name in weights)
    any_length = header.get("fixed_target_latent_steps", 0) is None
    pretrained = header.get("text_encoder_type") == "pretrained"
    require(
        not (predicts or any_length or pretrained or header.get("use_duration_predictor")),
        f"{where} is a model of a later Irodori-TTS; only v1 and v2 can be converted, such as "
        "Aratako/Irodori-TTS-500M-v2",
    )


def entry(header: Header, key: str, default: Any) -> Any:
    """An entry of the header, of the default's type."""
    value = header.get(key, default)
    require(
        type(value) is type(default),
        f"the model's config has {key} = {value!r}, but it must be of the kind of {default!r}",
    )
    return value


def _rules(header: Header, project: Project) -> dict[str, Any]:
    """Settings of the forward pass that no shape tells."""
    return {
        "norm_eps": entry(header, "norm_eps", 1e-5),
        "rope_theta": 10000.0,
        "text_projection": False,
        "speaker_partial_patches": False,
        "speaker_bidirectional": project.bidirectional,
    }


def config_of(args: DiTTTSModelConfig, header: Header, project: Project) -> JobConfig:
    """The config of a run that had trained the model, as far as it is known; codec and rate of its latents are not
    in it. `args`: of `sizes_of`."""
    config = JobConfig()
    model, data, encoder = config.model, config.data, config.encoder
    model.flavor, model.sizes = _FLAVOR, write_sizes(args, _FLAVOR)
    data.latent_channels, data.speaker_patch_size = args.latent_channels, args.speaker_patch_size
    data.max_frames = entry(header, "fixed_target_latent_steps", project.max_frames)
    data.max_speaker_frames = project.max_speaker_frames
    data.max_text_tokens = entry(header, "max_text_len", project.max_text_tokens)
    sampling = replace(config.sampling, start_t=0.999, text_scale=3.0)
    if args.speaker_reference:
        config.sampling = replace(sampling, speaker_scale=project.speaker_scale)
    else:
        data.max_caption_tokens = entry(header, "max_caption_len", data.max_text_tokens)
        config.sampling = replace(sampling, caption_scale=_CAPTION_SCALE)
    # Rows of one length: where the speech ends is learned from the zeros behind it.
    data.num_buckets, data.bucket_frames = 1, [data.max_frames]
    config.objective.loss_on_padding = True
    encoder.convention = project.convention
    encoder.model = "bytes"
    if project is IRODORI:
        encoder.model = LEARNED_SUBWORDS + entry(header, "text_tokenizer_repo", "")
    encoder.dim, encoder.n_layers = args.text_dim, args.text_n_layers
    encoder.n_heads = args.text_n_heads
    config.optimizer.lr = 1e-4
    check_numbers(config)
    return config


def check_is_of(config: JobConfig, args: DiTTTSModelConfig, project: Project, where: Path) -> None:
    """Raises InputError where a model's forward pass, or its texts, are not the project's."""
    needed: dict[str, Any] = {
        "encoder.convention": project.convention,
        "encoder.added_tokens": [],
        "encoder.normalize": "",
        "data.conditioning": [],
        "model.text_positions": "none",
        "objective.prediction": "velocity",
    }
    pairs = [(key, value, attrgetter(key)(config)) for key, value in needed.items()]
    rules = _rules({"norm_eps": args.norm_eps} if project is IRODORI else {}, project)
    pairs += [(f"model.sizes {key}", value, getattr(args, key)) for key, value in rules.items()]
    for key, value, found in pairs:
        require(
            found == value,
            f"{where} has {key} = {found!r}, but a model of {project.name} has {value!r}; only titan-tts can run it",
        )


_HEADER_NAMES = {
    **{"latent_dim": "latent_channels", "model_dim": "dim", "num_layers": "n_layers"},
    **{"num_heads": "n_heads", "text_dim": "text_dim", "text_vocab_size": "text_vocab_size"},
    **{f"{kind}_layers": f"{kind}_n_layers" for kind in ("text", "speaker")},
    **{f"{kind}_heads": f"{kind}_n_heads" for kind in ("text", "speaker")},
    **{each: each for each in ("speaker_dim", "speaker_patch_size", "adaln_rank", "norm_eps")},
    "timestep_embed_dim": "timestep_dim",
}


def header_of(config: JobConfig, args: DiTTTSModelConfig) -> dict[str, Any]:
    """Irodori-TTS's config of a model, for the header of its file."""
    found = {theirs: getattr(args, ours) for theirs, ours in _HEADER_NAMES.items()}
    for prefix, hidden, dim in (
        ("", args.mlp_dim, args.dim),
        ("text_", args.text_mlp_width, args.text_dim),
        ("speaker_", args.speaker_mlp_dim, args.speaker_dim),
    ):
        # They take int(dim · ratio).
        ratios = (hidden / dim, (hidden + 0.5) / dim)
        found[f"{prefix}mlp_ratio"] = next(each for each in ratios if int(dim * each) == hidden)
    tokenizer = config.encoder.model.removeprefix(LEARNED_SUBWORDS)
    if not args.speaker_reference:
        found |= {"use_caption_condition": True, "caption_tokenizer_repo": tokenizer}
        found |= {"caption_add_bos": True, "max_caption_len": config.data.max_caption_tokens}
        found |= {"caption_vocab_size": args.text_vocab_size, "caption_dim": args.speaker_dim}
        found |= {"caption_layers": args.caption_n_layers, "caption_heads": args.speaker_n_heads}
        found["caption_mlp_ratio"] = found["speaker_mlp_ratio"]
    return found | {
        "latent_patch_size": 1,
        "text_tokenizer_repo": tokenizer,
        "text_add_bos": True,
        "max_text_len": config.data.max_text_tokens,
        "fixed_target_latent_steps": config.data.max_frames,
    }
