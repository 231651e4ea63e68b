"""A pretrained text encoder: token ids to the last hidden state, on real tokens only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.initialization import plain_name
from torchtitan.models.dit_tts.text.encoder_record import check_fingerprint
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, fetch_weights, find_source
from torchtitan.models.dit_tts.text.packing import TextRows, pack_rows


class PretrainedTextEncoder(nn.Module):
    """Ids (B, L) to features (B, L, h); zero where there is no text token. Always in evaluation mode, also when it is
    trained: dropout would make the loss depend on the layout of ranks and on resumes."""

    def __init__(self, source: HFEncoderSpec, core: nn.Module | None = None):
        """core: with weights; None: built on torch's default device, without."""
        super().__init__()
        self.source = source
        self.core = source.build() if core is None else core
        self.width = source.width
        # Packed rows need a mask over pairs of tokens, which sdpa takes for certain.
        attention = getattr(self.core.config, "_attn_implementation", None)
        self.packs = source.family != "other" and attention == "sdpa"
        self.longest = 0
        """as of `pack_rows`"""
        self.train(False)

    def train(self, mode: bool = True) -> "PretrainedTextEncoder":
        return super().train(False)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.core.parameters()).dtype

    def rows(self, text_mask: np.ndarray, samples: np.ndarray | None = None) -> TextRows:
        """The layout in which a batch goes through this encoder; text_mask (B, L) bool, and samples as of
        `pack_rows`."""
        return pack_rows(text_mask, self.packs, samples, self.longest)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, rows: TextRows | None = None
    ) -> torch.Tensor:
        """ids (B, L); mask (B, L) bool, true at text tokens; rows from `rows`, made here if None."""
        if rows is None:
            rows = self.rows(mask.cpu().numpy()).to(ids.device)
        # Padding may have an id that this encoder lacks.
        packed = torch.where(rows.segment > 0, ids.flatten()[rows.token], 0)
        features = self.hidden(packed, rows).flatten(0, 1)
        nothing = features.new_zeros(1, self.width)
        return torch.cat([features, nothing])[rows.origin]

    def hidden(self, ids: torch.Tensor, rows: TextRows) -> torch.Tensor:
        """(R, W) ids to (R, W, h)."""
        limit = self.source.max_tokens
        if limit is not None and ids.shape[1] > limit:
            raise InputError(
                f"a text of {ids.shape[1]} tokens is longer than the {limit} that {self.source.model} has positions for; "
                "shorten it, or lower [data] max_text_tokens"
            )
        if not self.packs:
            # One text per row: positions are the model's own, and an empty row has one key.
            mask = rows.segment > 0
            mask[:, 0] = True
            return self.core(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        same = rows.same_segment
        if self.source.family == "t5":  # relative positions within the row are those in the text
            return self.core(input_ids=ids, attention_mask=same).last_hidden_state
        masks = {
            "full_attention": same,
            "sliding_attention": same & _window(ids.shape[1], self.core.config, ids.device),
        }
        return self.core(
            inputs_embeds=self._embed(ids), attention_mask=masks, position_ids=rows.position
        ).last_hidden_state

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """T5Gemma2's scaled embedding. Its own code for the end-of-image token makes the host wait for
        the device."""
        table: Any = self.core.embed_tokens
        found = F.embedding(ids, table.weight) * table.embed_scale.to(table.weight.dtype)
        image_end = (ids == table.eoi_token_index)[..., None]
        return torch.where(image_end, table.eoi_embedding.to(found.dtype), found)

    @torch.no_grad()
    def load_weights(self, write: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Loads the weights of an encoder that was built without. `write`: writes a full value to
        the part of the parameter that this process holds.
        """
        loaded = self.source.load(torch.float32)
        values = dict(loaded.named_parameters())
        for name, parameter in self.core.named_parameters():
            write(parameter, values[plain_name(name)].to(parameter.device))
        self._copy_buffers(loaded)

    def reset_buffers(self) -> None:
        """Computes buffers that no checkpoint has, such as rotary frequencies, after `to_empty`."""
        with torch.device("cpu"):
            self._copy_buffers(self.source.build())

    def _copy_buffers(self, other: nn.Module) -> None:
        values = dict(other.named_buffers())
        for name, buffer in self.core.named_buffers():
            buffer.copy_(values[plain_name(name)])

    def move_buffers(self, device: torch.device) -> None:
        """Moves the buffers to where the encoder computes, for parameters that stay on the CPU."""
        for module in self.core.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)


def _window(width: int, config, device: torch.device) -> torch.Tensor:
    """(W, W) bool of T5Gemma2's sliding attention: w tokens around the query, one more to the right
    of it where w is even."""
    window = config.sliding_window
    index = torch.arange(width, device=device)
    distance = index[:, None] - index[None, :]
    return (distance < (window + 1) // 2) & (-distance < window // 2 + 1)


def load_text_encoder(
    encoder: Encoder, device: torch.device | str, folder: Path | None = None
) -> PretrainedTextEncoder:
    """A frozen encoder, as [encoder] has it, with its weights on `device`. `folder`: of a run that has its own copy of the
    encoder's config."""
    source = find_source(encoder.model, folder=folder)
    core = source.load(TORCH_DTYPE_MAP[encoder.dtype])
    return PretrainedTextEncoder(source, core).requires_grad_(False).to(device)


def load_run_encoder(
    folder: Path, encoder: Encoder, device: torch.device | str
) -> PretrainedTextEncoder:
    """The frozen encoder of the trained run in `folder`."""
    source = find_source(encoder.model, folder=folder)
    fetch_weights(source.model)
    check_fingerprint(folder, encoder, source.fingerprint(encoder.dtype))
    return load_text_encoder(encoder, device, folder)
