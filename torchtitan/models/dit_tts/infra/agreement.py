"""All ranks must train on the same order of the same data: it is compared once, at the start.

Each rank computes the order by itself. Where the ranks of a job read copies of the data that differ (a
node's disk with a shard missing, a copy that was damaged), each would go through another order without a
word, and samples would come twice or never.
"""

import json
from functools import partial
from typing import Any

import torch.distributed as dist

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.feature_cache import ready_text_features


def build_agreed_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: JobConfig
) -> LatentDataLoader:
    """`build_dataloader`, with text features where [encoder] cache_features asks for them, and then the same
    on every rank.

    Raises:
        InputError: on every rank, where two ranks have other data, tokens or numbers of steps.
    """
    find_features = None
    if job_config.encoder.cache_features:
        find_features = partial(ready_text_features, tokenizer=tokenizer, job_config=job_config)
    loader = build_dataloader(dp_world_size, dp_rank, tokenizer, job_config, find_features)
    parts = json.loads(loader.state_dict()["order_fingerprint"])
    parts["tokens"] = tokenizer.vocabulary.fingerprint
    parts["steps"] = job_config.training.steps
    if loader.features is not None:
        parts["text_features"] = loader.features.encoder_fingerprint
    assert_equal_across_ranks(parts)
    return loader


def assert_equal_across_ranks(parts: dict[str, Any]) -> None:
    """Raises InputError on every rank where `parts` (JSON values) are not the same on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(
                    f"rank {rank} is about to train on other data than rank 0: its {name} is "
                    f"{other[name]}, rank 0's {value}; every machine must see the same archives in "
                    f"[data] path"
                )
