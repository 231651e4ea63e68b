"""Initial weights of a run whose vocabulary has grown: each token keeps the row that it had."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.model.conditions import ConditionedModel
from torchtitan.models.dit_tts.model.initialization import plain_name
from torchtitan.models.dit_tts.run import checkpoint_storage
from torchtitan.models.dit_tts.text.build_tokenizer import load_vocabulary, origin_of_weights
from torchtitan.models.dit_tts.text.vocabulary import rows_in

_LEARNED, _BEYOND_PRETRAINED = "text_encoder.embedding.weight", "condition_embedding.weight"


class GrownEmbedding:
    """The embedding that has more rows than the checkpoint's."""

    def __init__(self, name: str, rows: np.ndarray):
        self.name = name
        """of the parameter, and of the checkpoint's tensor"""
        self._rows = torch.from_numpy(rows)

    @torch.no_grad()
    def load(self, model: nn.Module, path: Path) -> None:
        """Writes the rows that the checkpoint has; the others keep their initial values. A collective."""
        table = checkpoint_storage.read_table(path).state_dict_metadata
        # The run of a pretrained encoder may have had neither added nor conditioning tokens.
        if self.name not in table:
            return
        size = cast(TensorStorageMetadata, table[self.name]).size
        saved = {self.name: torch.empty(size)}
        checkpoint_storage.load_checkpoint(saved, path)
        named = {plain_name(name): each for name, each in model.named_parameters()}
        parameter = named[self.name]
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()
        known = (self._rows >= 0).to(full.device)
        full[known] = saved[self.name][self._rows[self._rows >= 0]].to(full)
        cast(ConditionedModel, model).write_parameter(parameter, full)


def find_grown(config: JobConfig, folder: Path) -> GrownEmbedding | None:
    """None where the run in `folder` has the vocabulary of its initial weights."""
    origin = origin_of_weights(config, folder)
    if origin is None or origin == folder:
        return None
    before, now = load_vocabulary(origin), load_vocabulary(folder)
    if before.fingerprint == now.fingerprint:
        return None
    name = _LEARNED if now.is_learned else _BEYOND_PRETRAINED
    return GrownEmbedding(name, rows_in(before, now))
