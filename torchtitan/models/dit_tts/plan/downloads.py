"""What a run takes from the Hugging Face hub, and whether this machine has it. Nothing is fetched."""

import os
from dataclasses import dataclass
from pathlib import Path

from torchtitan.models.dit_tts.codec.dac_vae_weights import HUB_NAME, SUFFIXES
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec

_CODEC_FILE = "weights.pth"
# Float32 parameters with the watermark branch, so that the size is known before the download.
_CODEC_PARAMETERS = {"facebook/dacvae-watermarked": 107_671_171}


@dataclass(frozen=True)
class Download:
    """Something with weights that a config names."""

    purpose: str
    """what it is for"""

    name: str
    """hub name or path"""

    files: str
    """which files of it are used"""

    here: bool
    """all of them are on this machine"""

    size: str
    """bytes, or what is known of them, in words"""

    command: str = ""
    """fetches it, on a machine with network"""


def downloads(config: JobConfig, source: HFEncoderSpec | None) -> list[Download]:
    """The pretrained text encoder and the codec, as far as the config has them.

    Args:
        source: the text encoder, if it is a pretrained one.
    """
    found = []
    if source is not None:
        found.append(_encoder(config, source))
    codec = config.sampling.codec
    if codec != "mel_dct":
        found.append(_codec(codec))
    return found


def _encoder(config: JobConfig, source: HFEncoderSpec) -> Download:
    weights = source.files()
    purpose = "text encoder" + (", to make the features" if config.encoder.cache_features else "")
    if os.path.isdir(source.model):
        config_here = tokenizer_here = True  # a folder is taken as it is
    else:
        config_here = not source.built_in
        tokenizer_here = _cached(source.model, "tokenizer.json") is not None
    if weights:
        files = ", ".join(path.name for path in weights)
        size = _gib(sum(path.stat().st_size for path in weights))
    else:
        files = "config.json, tokenizer.json, tokenizer_config.json and the weights (*.safetensors)"
        size = (
            f"not known without network; more than its text encoder's "
            f"{_gib(2 * source.num_parameters())} in bfloat16"
        )
    return Download(
        purpose,
        source.model,
        files,
        bool(weights) and config_here and tokenizer_here,
        size,
        "" if os.path.isdir(source.model) else f"hf download {source.model}",
    )


def _codec(name: str) -> Download:
    purpose = "codec, for preparation and generation; training does without"
    path = Path(name).expanduser()
    # As the codec takes a name: what is there or ends as a file of weights does is a path.
    if path.exists() or path.suffix in SUFFIXES or not HUB_NAME.fullmatch(name):
        size = "not there" if not path.exists() else "see the path"
        size = _gib(path.stat().st_size) if path.is_file() else size
        return Download(purpose, name, "as given", path.exists(), size)
    cached = _cached(name, _CODEC_FILE)
    if cached is not None:
        size = _gib(cached.stat().st_size)
    elif name in _CODEC_PARAMETERS:
        size = f"about {_gib(4 * _CODEC_PARAMETERS[name])}"
    else:
        size = "not known without network"
    command = f"hf download {name} {_CODEC_FILE}"
    return Download(purpose, name, _CODEC_FILE, cached is not None, size, command)


def _cached(name: str, file: str) -> Path | None:
    """A hub's file in this machine's cache; None also where the hub's library is not installed."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
