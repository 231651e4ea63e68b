"""Pretrained text encoders by name: where one comes from, how it is built, and loading it exactly.

Text only: of a T5Gemma2 neither the vision tower nor the decoder is read into memory, of a T5 no
decoder. `T5Gemma2Encoder.from_pretrained` of a whole checkpoint loads nothing and says so in a
warning only; here every weight that the checkpoint lacks is an error.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.args import LEARNED_UNITS

if TYPE_CHECKING:  # importing it takes seconds, and runs with the learned encoder do without it
    from transformers import PretrainedConfig

CONFIG_FILE = "text_encoder.json"
"""in a run's folder: what encoder it was trained with"""

_GEMMA3 = {"head_dim": 256, "vocab_size": 262_144, "query_pre_attn_scalar": 256}

# Text configs as the hub has them, so that sizes are known before anything is downloaded.
KNOWN_SIZES: dict[str, dict[str, Any]] = {
    "google/t5gemma-2-270m-270m": {
        "model_type": "t5gemma2_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        **_GEMMA3,
    },
    "google/t5gemma-2-1b-1b": {
        "model_type": "t5gemma2_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        **_GEMMA3,
    },
    "google/t5gemma-2-4b-4b": {
        "model_type": "t5gemma2_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        **_GEMMA3,
    },
    "google-t5/t5-base": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
    },
}

_T5_LIKE = ("t5", "mt5", "umt5")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SHOWN = 5


def is_pretrained(model: str) -> bool:
    """Whether [encoder] model names an encoder that is loaded, not the learned one's unit."""
    return model not in LEARNED_UNITS


@dataclass(frozen=True)
class EncoderSource:
    """A pretrained encoder that can be built, without its weights."""

    model: str
    """hub name or absolute folder"""

    config: "PretrainedConfig"
    """of the whole model"""

    built_in: bool = False
    """nothing is on this machine: the sizes are those of KNOWN_SIZES"""

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

    @cached_property
    def width(self) -> int:
        """Width of the features."""
        return self._size("hidden_size", "d_model")

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding, of which the tokenizer may use fewer."""
        return self._size("vocab_size")

    def _size(self, *names: str) -> int:
        for config in (self.text_config, self.text_config.get_text_config()):
            for name in names:
                if isinstance(getattr(config, name, None), int):
                    return getattr(config, name)
        raise InputError(
            f"[encoder] model = {self.model!r}: its config ({self.config.model_type}) has no "
            f"{' or '.join(names)}; use an encoder with a last_hidden_state, such as T5Gemma2 or T5"
        )

    def build(self) -> nn.Module:
        """The encoder on torch's default device and in its default dtype, with arbitrary weights."""
        architecture, options, _ = self._architecture()
        from transformers.initialization import no_init_weights

        with no_init_weights():
            return _core(architecture(self._fresh_text_config(), **options))

    def load(self, dtype: torch.dtype) -> nn.Module:
        """The encoder on the CPU with its weights.

        Raises:
            InputError: no weights, or any that is missing or of another shape.
        """
        architecture, options, mapping = self._architecture()
        with _quiet():
            try:
                model, info = architecture.from_pretrained(
                    self.model,
                    config=self._fresh_text_config(),
                    dtype=dtype,
                    key_mapping=mapping,
                    output_loading_info=True,
                    **options,
                )
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                raise InputError(
                    f"[encoder] model = {self.model!r} cannot be loaded ({_first_line(error)}); give a "
                    f"folder with config.json and its safetensors, or download it where there is a "
                    f"network: hf download {self.model}"
                ) from error
        self._check_loaded(info)
        return _core(model)

    def _check_loaded(self, info: dict[str, Any]) -> None:
        """Raises InputError unless every weight of the encoder came out of the checkpoint."""
        missing = sorted(info["missing_keys"])
        wrong = sorted(str(entry[0]) for entry in info["mismatched_keys"])
        kinds = [
            (missing, "are not in the checkpoint and would be random"),
            (wrong, "have another shape in the checkpoint"),
            (sorted(map(str, info.get("error_msgs") or [])), "were reported as errors"),
        ]
        for names, what in kinds:
            if names:
                shown = ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
                raise InputError(
                    f"[encoder] model = {self.model!r}: {len(names)} of the encoder's weights {what} "
                    f"({shown}); restore the checkpoint, or name the model that it is of"
                )

    def _architecture(self) -> tuple[Any, dict[str, Any], dict[str, str] | None]:
        """(class, options of its construction, renaming of the checkpoint's keys)."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

        if self.family == "t5gemma2":
            try:
                from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextEncoder
            except ImportError as error:
                raise InputError(
                    f"[encoder] model = {self.model!r} needs transformers 5 with T5Gemma2, where "
                    f"{transformers.__version__} is installed; pip install 'titan-tts[pretrained]'"
                ) from error
            # The text encoder alone does not know its model's end-of-image token.
            parent = self.config if self.config.model_type == "t5gemma2_text" else self.config.encoder
            token = getattr(parent, "eoi_token_index", None)
            options = {} if token is None else {"eoi_token_index": token}
            return T5Gemma2TextEncoder, options, {r"^model\.encoder\.(text_model\.)?": ""}
        kind = type(self.config)
        if kind in MODEL_FOR_TEXT_ENCODING_MAPPING.keys():
            architecture = MODEL_FOR_TEXT_ENCODING_MAPPING[kind]
        else:
            architecture = transformers.AutoModel._model_mapping[kind]
        import inspect

        # A pooler is not asked for, and checkpoints of masked language models have none.
        pooled = "add_pooling_layer" in inspect.signature(architecture).parameters
        return architecture, {"add_pooling_layer": False} if pooled else {}, None

    def _fresh_text_config(self) -> "PretrainedConfig":
        """A copy: models write to their configs."""
        config = type(self.text_config).from_dict(self.text_config.to_dict())
        if config.model_type == "t5gemma2_text":
            # The whole model's config sets it; the text part alone has no default.
            config.dropout_rate = getattr(self.text_config, "dropout_rate", 0.0)
        return config

    def num_parameters(self) -> int:
        """Parameters of the text encoder."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def matmul_sizes(self) -> tuple[int, int, int]:
        """(weights of the matrix products, blocks, heads times the width of a head)."""
        with torch.device("meta"):
            core = self.build()
        weights = sum(m.weight.numel() for m in core.modules() if isinstance(m, nn.Linear))
        config = self.text_config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or config.num_heads
        head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        return weights, len(blocks_of(core)), heads * (head_dim or self.width // heads)

    def files(self) -> list[Path]:
        """The checkpoint's weight files that are on this machine; empty if they are not."""
        for name in _WEIGHTS:
            whole = self._file(name)
            if whole is not None:
                return [whole]
            index = self._file(f"{name}.index.json")
            if index is not None:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                paths = [self._file(part) for part in names]
                return [path for path in paths if path is not None] if all(paths) else []
        return []

    def has_weights(self) -> bool:
        return bool(self.files())

    def _file(self, name: str) -> Path | None:
        if os.path.isdir(self.model):
            path = Path(self.model, name)
            return path if path.is_file() else None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.model, name)
        return Path(found) if isinstance(found, str) else None

    def fingerprint(self, dtype: str) -> str:
        """16 hex digits: equal for encoders that give equal features.

        Args:
            dtype: precision that the encoder computes in, as [encoder] dtype has it.

        Raises:
            InputError: the weights are not on this machine.
        """
        files = self.files()
        if not files:
            raise InputError(
                f"[encoder] model = {self.model!r}: its weights are not on this machine; download "
                f"them: hf download {self.model}"
            )
        digest = hashlib.sha256(dtype.encode())
        digest.update(json.dumps(_sizes_of(self.text_config), sort_keys=True).encode())
        for path in files:
            contents = xxhash.xxh3_128()
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    contents.update(block)
            digest.update(contents.digest())
        return digest.hexdigest()[:16]


def find_source(
    model: str, *, download: bool = True, folder: Path | None = None
) -> EncoderSource:
    """The encoder that [encoder] model names.

    Args:
        model: hub name or folder.
        download: whether the hub may be asked where this machine has no config.
        folder: a run's folder, whose own copy of the config comes first.

    Raises:
        InputError: no such model, no network, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InputError(
            f"[encoder] model = {model!r} needs transformers ({error}); pip install "
            f"'titan-tts[pretrained]'"
        ) from error
    if os.path.isdir(model):
        model = os.path.abspath(model)
    kept = folder / CONFIG_FILE if folder is not None else None
    if kept is not None and kept.is_file():
        record = json.loads(kept.read_text())
        if record["model"] == model:
            return EncoderSource(model, _config_of(record["config"]))
    if not os.path.isdir(model) and model.count("/") != 1:
        raise InputError(
            f"[encoder] model = {model!r} is neither a folder nor a hub name; allowed are 'bytes' and "
            f"'chars' (the learned encoder), a folder, or a name such as 'google/t5gemma-2-270m-270m'"
        )
    reason: Exception | None = None
    with _quiet():
        for offline in (True, False) if download else (True,):
            try:
                config = AutoConfig.from_pretrained(model, local_files_only=offline)
                return EncoderSource(model, config)
            except (OSError, ValueError) as error:
                reason = error
                if os.path.isdir(model):
                    break
    if not download and model in KNOWN_SIZES:
        return EncoderSource(model, _config_of(KNOWN_SIZES[model]), built_in=True)
    raise InputError(
        f"[encoder] model = {model!r} cannot be found ({_first_line(reason)}); give a folder that has "
        f"its config.json, or download it where there is a network: hf download {model}"
    ) from reason


def _config_of(sizes: dict[str, Any]) -> "PretrainedConfig":
    if sizes["model_type"] == "t5gemma2_text":  # not in the mapping of every version
        from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2TextConfig

        return T5Gemma2TextConfig.from_dict(sizes)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)


def _core(model: nn.Module) -> nn.Module:
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
    """The config without what does not change the features."""
    passing = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
    return {key: value for key, value in config.to_dict().items() if key not in passing}


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' table of unexpected keys, which is long for every text-only load, and
    its bars: what counts of it is checked here."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
