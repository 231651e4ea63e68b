"""Pretrained text encoders by name: where one comes from, how it is built, and loading it exactly.

Text only: of a T5Gemma2 neither the vision tower nor the decoder is read into memory, of a T5 no
decoder. `T5Gemma2Encoder.from_pretrained` of a whole checkpoint loads nothing and says so in a
warning only; here every weight that the checkpoint lacks is an error.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.hf_files import (
    contents_digest,
    fetch_weights,
    first_line,
    weight_files,
)
from torchtitan.models.dit_tts.text.known_encoders import KNOWN_SIZES

if TYPE_CHECKING:  # importing it takes seconds, and runs with the learned encoder do without it
    from transformers import PretrainedConfig

CONFIG_FILE = "text_encoder.json"
"""in a run's folder: what encoder it was trained with"""

# Keys of a config about files, training, labels, decoding and the decoder.
_PASSING = re.compile(
    r"^_|version|dtype|architectures|use_cache|label|problem|return_|^output_|_token|decoder|init|drop"
    r"|classifier|generat|^tie_"
)

_T5_LIKE = ("t5", "mt5", "umt5")
_SHOWN = 5


@dataclass(frozen=True)
class HFEncoderSpec:
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

    @property
    def _own_config(self) -> "PretrainedConfig":
        """Where the encoder's own sizes stand."""
        own = getattr(self.text_config, "encoder", None)
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
        """Longest text that there are positions for; None where positions are relative."""
        if self.family != "other":
            return None
        config = self.text_config.get_text_config()
        # RoBERTa and its kin count positions from behind the padding's id.
        places = getattr(config, "max_position_embeddings", None)
        return places - 2 if isinstance(places, int) and places > 2 else None

    def _size(self, *names: str) -> int:
        for config in (self.text_config, self._own_config):
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
                    f"[encoder] model = {self.model!r} cannot be loaded ({first_line(error)}); give a "
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
            parent = (
                self.config if self.config.model_type == "t5gemma2_text" else self.config.encoder
            )
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
        if config.model_type == "t5gemma":
            config.is_encoder_decoder = False  # the class of its encoder alone asks for that
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
        config = self._own_config
        blocks = blocks_of(core)
        n_layers = getattr(config, "num_hidden_layers", None) or len(blocks)
        inside = _products(blocks)
        # ALBERT goes through one block again and again.
        weights = _products(core) - inside + inside * n_layers // len(blocks)
        heads = getattr(config, "num_attention_heads", None) or config.num_heads
        head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        return weights, n_layers, heads * (head_dim or self.width // heads)

    def files(self) -> list[Path]:
        """The checkpoint's weight files that are on this machine; empty if they are not."""
        return weight_files(self.model)

    def has_weights(self) -> bool:
        return bool(self.files())

    def fetch(self) -> None:
        """Downloads a hub name's weights and tokenizer, if the weights are not here; see `fetch_weights`."""
        fetch_weights(self.model)

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
            digest.update(contents_digest(path))
        return digest.hexdigest()[:16]


def find_source(model: str, *, download: bool = True, folder: Path | None = None) -> HFEncoderSpec:
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
            return HFEncoderSpec(model, _config_of(record["config"]))
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
                return HFEncoderSpec(model, config)
            except Exception as error:  # the library's validators raise kinds of their own
                reason = error
                if os.path.isdir(model):
                    break
    if not download and model in KNOWN_SIZES:
        return HFEncoderSpec(model, _config_of(KNOWN_SIZES[model]), built_in=True)
    raise InputError(
        f"[encoder] model = {model!r} cannot be found ({first_line(reason)}); give a folder that has "
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


def _products(module: nn.Module) -> int:
    """Weights of the linear layers."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _sizes_of(config: "PretrainedConfig") -> dict[str, Any]:
    """What of a config changes the features: what differs from its class's defaults, as another
    version of transformers may have more of those, and says how a text is encoded."""
    return {
        key: value
        for key, value in config.to_diff_dict().items()
        if not _PASSING.search(key) and value not in (None, False)
    }


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
