"""Pretrained text encoders of Hugging Face: find one by its name, build it, and load it exactly.

Only the text encoder is read into memory, without vision tower and decoder, and every weight that the checkpoint lacks
is an error.
"""

import hashlib
import inspect
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError, first_line, require_modules
from torchtitan.models.dit_tts.files import load_local_or_hub, quiet_transformers
from torchtitan.models.dit_tts.text.encoder_record import read_record
from torchtitan.models.dit_tts.text.vocabulary import named

if TYPE_CHECKING:  # importing it takes seconds, and runs with the learned encoder do without it
    from transformers import PretrainedConfig

# Config keys that do not change features: files, training, labels, decoding, the decoder.
_IRRELEVANT = re.compile(
    r"^_|version|dtype|architectures|use_cache|label|problem|return_|^output_|_token|decoder|init|drop"
    r"|classifier|generat|^tie_"
)

_T5_LIKE = ("t5", "mt5", "umt5")


WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""of a checkpoint in one file; one in parts has NAME.index.json instead"""

_T5GEMMA2 = {"model_type": "t5gemma2_text", "head_dim": 256, "query_pre_attn_scalar": 256}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "sliding_window", "vocab_size"),
)
KNOWN_SIZES: dict[str, dict[str, Any]] = {
    f"google/t5gemma-2-{name}-{name}": _T5GEMMA2 | dict(zip(_SIZES, (*sizes, 262_144), strict=True))
    for name, sizes in {
        "270m": (640, 2048, 18, 4, 1, 512),
        "1b": (1152, 6912, 26, 4, 1, 512),
        "4b": (2560, 10240, 34, 8, 4, 1024),
    }.items()
}
"""text configs as the hub has them, so that sizes are known before any download"""


@dataclass(frozen=True)
class HFEncoderSpec:
    """A pretrained encoder that can be built, without its weights."""

    model: str
    """hub name or absolute folder"""

    config: "PretrainedConfig"
    """of the full model"""

    @property
    def family(self) -> str:
        """ "t5gemma2", "t5" or "other"; texts are packed for the first two."""
        kind = self.config.model_type
        if kind in ("t5gemma2", "t5gemma2_text"):
            return "t5gemma2"
        return "t5" if kind in _T5_LIKE else "other"

    @property
    def text_config(self) -> "PretrainedConfig":
        """The config of the part that is built."""
        if self.config.model_type == "t5gemma2":
            return self.config.encoder.text_config
        return self.config

    @property
    def _own_config(self) -> "PretrainedConfig":
        """The config with the encoder's own sizes."""
        own: Any = getattr(self.text_config, "encoder", None)
        return own if hasattr(own, "hidden_size") else self.text_config.get_text_config()

    @cached_property
    def width(self) -> int:
        """Width of the features."""
        return self._size("hidden_size", "d_model")

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding, of which the tokenizer may use fewer."""
        return self._size("vocab_size")

    @property
    def max_tokens(self) -> int | None:
        """Maximum length of a text by the encoder's positions; None where these are relative."""
        if self.family != "other":
            return None
        config = self.text_config.get_text_config()
        # RoBERTa and similar models count positions from the padding's id + 1.
        positions = getattr(config, "max_position_embeddings", None)
        return positions - 2 if isinstance(positions, int) and positions > 2 else None

    def _size(self, *names: str) -> int:
        for config in (self.text_config, self._own_config):
            for name in names:
                if isinstance(getattr(config, name, None), int):
                    return getattr(config, name)
        raise InputError(
            f"[encoder] model = {self.model!r}: its config ({self.config.model_type}) has no {' or '.join(names)}; use "
            "an encoder such as T5Gemma2 or T5"
        )

    def build(self) -> nn.Module:
        """The encoder on torch's default device and in its default dtype, with arbitrary weights."""
        architecture, options, _ = self._architecture()
        from transformers.initialization import no_init_weights

        with no_init_weights():
            return _core(architecture(self._fresh_text_config(), **options))

    def load(self, dtype: torch.dtype) -> nn.Module:
        """The encoder on the CPU with its weights."""
        architecture, options, mapping = self._architecture()
        with quiet_transformers():
            try:
                model, info = architecture.from_pretrained(
                    self.model,
                    config=self._fresh_text_config(),
                    dtype=dtype,
                    key_mapping=mapping,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are named below
                    **options,
                )
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                raise InputError(
                    f"[encoder] model = {self.model!r} cannot be loaded ({first_line(error)}); "
                    f"{download_by_hand(self.model)}"
                ) from error
        bad = [*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])]
        bad += info.get("error_msgs") or []
        if bad:
            raise InputError(
                f"[encoder] model = {self.model!r}: {len(bad)} of the encoder's weights are not in the checkpoint, or "
                f"have another shape there ({named(sorted(map(str, bad)))}); restore it"
            )
        return _core(model)

    def _architecture(self) -> tuple[Any, dict[str, Any], dict[str, str] | None]:
        """(class, options of its construction, renaming of the checkpoint's keys)."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

        if self.family == "t5gemma2":
            from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextEncoder

            # The text encoder alone does not know its model's end-of-image token.
            token = getattr(getattr(self.config, "encoder", self.config), "eoi_token_index", None)
            options = {} if token is None else {"eoi_token_index": token}
            return T5Gemma2TextEncoder, options, {r"^model\.encoder\.(text_model\.)?": ""}
        kind: Any = type(self.config)
        encoders: Any = MODEL_FOR_TEXT_ENCODING_MAPPING
        mapping: Any = encoders if kind in encoders else transformers.AutoModel._model_mapping
        architecture = mapping[kind]
        # A pooler is not asked for, and checkpoints of masked language models have none.
        pooled = "add_pooling_layer" in inspect.signature(architecture).parameters
        return architecture, {"add_pooling_layer": False} if pooled else {}, None

    def _fresh_text_config(self) -> "PretrainedConfig":
        """A copy: models write to their configs."""
        config = type(self.text_config).from_dict(self.text_config.to_dict())
        if config.model_type == "t5gemma":
            config.is_encoder_decoder = False  # the class of its encoder alone asks for that
        if config.model_type == "t5gemma2_text":
            # The config of the full model sets it; the text part alone has no default.
            config.dropout_rate = getattr(self.text_config, "dropout_rate", 0.0)
        return config

    def num_parameters(self) -> int:
        """Parameters of the text encoder."""
        if self.family == "t5gemma2":
            c = self.text_config
            norms = c.num_hidden_layers * (4 * self.width + 2 * c.head_dim) + self.width
            end_of_image = self.width
            return self.matmul_sizes()[0] + norms + self.vocab_size * self.width + end_of_image
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def matmul_sizes(self) -> tuple[int, int, int]:
        """(weights of the matmuls, blocks, heads times the width of a head)."""
        if (
            self.family == "t5gemma2"
        ):  # without its class, which takes a second and a half to import
            c, blocks = self.text_config, self.text_config.num_hidden_layers
            heads = c.num_attention_heads * c.head_dim
            attention = 2 * self.width * (heads + c.num_key_value_heads * c.head_dim)
            return blocks * (attention + 3 * self.width * c.intermediate_size), blocks, heads
        with torch.device("meta"):
            core = self.build()
        weights = sum(each.weight.numel() for each in core.modules() if isinstance(each, nn.Linear))
        config = self._own_config
        heads = getattr(config, "num_attention_heads", None) or config.num_heads
        head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        return weights, len(blocks_of(core)), heads * (head_dim or self.width // heads)

    def fingerprint(self, dtype: str) -> str:
        """16 hex digits, equal for encoders that give equal features. `dtype`: as [encoder] dtype."""
        files = weight_files(self.model)
        if not files:
            raise InputError(
                f"[encoder] model = {self.model!r}: its weights are not here; {download_by_hand(self.model)}"
            )
        digest = hashlib.sha256(dtype.encode())
        digest.update(json.dumps(_sizes_of(self.text_config), sort_keys=True).encode())
        for path in files:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
        return digest.hexdigest()[:16]


def find_source(model: str, *, download: bool = True, folder: Path | None = None) -> HFEncoderSpec:
    """The encoder that [encoder] model names; arguments as of `load_local_or_hub`, and the folder of a run,
    whose own copy of the config comes first."""
    require_modules("transformers")
    if os.path.isdir(model):
        model = os.path.abspath(model)
    record = None if folder is None else read_record(folder)
    if record is not None and record["model"] == model:
        return HFEncoderSpec(model, make_hf_config(record["config"]))
    if not os.path.isdir(model) and model.count("/") != 1:
        raise InputError(
            f"[encoder] model = {model!r} is neither a folder nor a hub name; allowed are 'bytes', 'chars', a folder, or "
            "a name such as 'google/t5gemma-2-270m-270m'"
        )
    return HFEncoderSpec(model, load_hf_config(model, download))


def download_by_hand(model: str) -> str:
    """The advice for a model whose files are incomplete."""
    if os.path.isdir(model):
        return "give a complete folder, whose files belong together"
    return f"give a complete folder, or download it on a machine with network access: hf download {model}"


def load_hf_config(model: str, download: bool) -> "PretrainedConfig":
    """The config of a model; without a download also from KNOWN_SIZES. Arguments as of `load_local_or_hub`."""
    from transformers import AutoConfig

    def load(**where: Any) -> "PretrainedConfig":
        return AutoConfig.from_pretrained(model, **where)

    try:
        with quiet_transformers():
            return load_local_or_hub(load, model, download=download)
    except Exception as error:  # the library's validators raise kinds of their own
        if not download and model in KNOWN_SIZES:
            return make_hf_config(KNOWN_SIZES[model])
        raise InputError(
            f"[encoder] model = {model!r} cannot be found ({first_line(error)}); {download_by_hand(model)}"
        ) from error


def make_hf_config(sizes: dict[str, Any]) -> "PretrainedConfig":
    """A config from its JSON."""
    if sizes["model_type"] == "t5gemma2_text":  # not in the mapping of every version
        from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2TextConfig

        return T5Gemma2TextConfig.from_dict(sizes)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)


def weight_files(model: str) -> list[Path]:
    """Weight files of a folder, or of a hub name in its cache; empty where any is missing."""
    for name in WEIGHTS:
        single = _file(model, name)
        if single is not None:
            return [single]
        index = _file(model, f"{name}.index.json")
        if index is not None:
            names = sorted(set(read_json(index, weight_map=dict).get("weight_map", {}).values()))
            paths = [_file(model, part) for part in names]
            return [path for path in paths if path is not None] if all(paths) else []
    return []


def _file(model: str, name: str) -> Path | None:
    if os.path.isabs(model) or os.path.isdir(model):
        path = Path(model, name)
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name)
    return Path(found) if isinstance(found, str) else None


def fetch_weights(model: str) -> None:
    """Downloads config, tokenizer and weights of a hub name whose weights are not on this machine."""
    if weight_files(model):
        return
    if os.path.isabs(model) or os.path.isdir(model):
        raise InputError(
            f"[encoder] model = {model!r} has no weights ({' or '.join(WEIGHTS)}); restore them, or give the folder's new "
            "path by --encoder (for train --encoder.model)"
        )
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model"])
        if not weight_files(model):
            snapshot_download(model, allow_patterns=["pytorch_model*"])
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"[encoder] model = {model!r} cannot be downloaded ({first_line(error)}); {download_by_hand(model)}"
        ) from error


def _core(model: Any) -> nn.Module:
    """The encoder inside a model that also has a decoder, or ties its embedding to another name."""
    if getattr(model.config, "model_type", "") in _T5_LIKE:
        return model.encoder
    if getattr(model.config, "is_encoder_decoder", False):
        return model.get_encoder()
    return model


def blocks_of(core: nn.Module) -> nn.ModuleList:
    """The encoder's blocks: its module list with the most parameters."""
    lists = [module for module in core.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def _sizes_of(config: "PretrainedConfig") -> dict[str, Any]:
    """The part of a config that changes features. Defaults are left out, as another version of
    transformers may have more of them."""
    return {
        key: value
        for key, value in config.to_diff_dict().items()
        if not _IRRELEVANT.search(key) and value not in (None, False)
    }
