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


def find_grown(config: JobConfig, folder: Path) -> tuple[str, np.ndarray] | None:
    """(name, rows) of the embedding that has more rows than in the initial weights of the run in `folder`, as
    `rows_in`; None where the vocabulary is the same."""
    origin = origin_of_weights(config, folder)
    if origin is None or origin == folder:
        return None
    before, now = load_vocabulary(origin), load_vocabulary(folder)
    if before.fingerprint == now.fingerprint:
        return None
    return (_LEARNED if now.is_learned else _BEYOND_PRETRAINED), rows_in(before, now)


@torch.no_grad()
def load_grown(model: nn.Module, path: Path, name: str, rows: np.ndarray) -> None:
    """Writes the rows of the embedding that the checkpoint has; the others keep their initial values. A collective."""
    table = checkpoint_storage.read_table(path).state_dict_metadata
    # The run of a pretrained encoder may have had neither added nor conditioning tokens.
    if name not in table:
        return
    saved = {name: torch.empty(cast(TensorStorageMetadata, table[name]).size)}
    checkpoint_storage.load_checkpoint(saved, path)
    [parameter] = (each for own, each in model.named_parameters() if plain_name(own) == name)
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()
    known = torch.from_numpy(np.flatnonzero(rows >= 0))
    full[known.to(full.device)] = saved[name][rows[rows >= 0]].to(full)
    cast(ConditionedModel, model).write_parameter(parameter, full)
