"""The frozen text encoder of a training run, outside the model and its checkpoints, or its stored features."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import Encoder, JobConfig, is_pretrained
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.row_loader import Features
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.collectives import long_timeout_group, run_on_all_ranks
from torchtitan.models.dit_tts.text.build_tokenizer import origin_of_weights
from torchtitan.models.dit_tts.text.encoder_record import (
    check_fingerprint,
    read_record,
    write_record,
)
from torchtitan.models.dit_tts.text.feature_store import (
    FeatureKind,
    TextFeatures,
    feature_kind,
    longest_text,
    open_text_features,
    with_stored_fingerprint,
)
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, blocks_of, find_source
from torchtitan.models.dit_tts.text.hf_files import fetch_weights
from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder
from torchtitan.tools.logging import logger


def build_frozen_encoder(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    features: Features | None,
    device: torch.device,
) -> PretrainedTextEncoder | None:
    """The encoder whose features a run computes outside the model, if there is one and no `features` are
    stored. Records a pretrained encoder, frozen or not, in the run folder."""
    encoder, folder = job_config.encoder, Path(job_config.job.dump_folder)
    if not is_pretrained(encoder.model):
        return None
    source = find_source(encoder.model, folder=folder)
    longest = job_config.data.max_text_tokens
    if source.max_tokens is not None and longest > source.max_tokens and features is None:
        raise InputError(
            f"[data] max_text_tokens = {longest}, but {encoder.model} has positions for "
            f"{source.max_tokens} tokens; lower it to that"
        )
    if not encoder.frozen:
        fingerprint = ""  # its weights are the checkpoint's
    elif features is not None:
        fingerprint = features.encoder_fingerprint
    else:
        fingerprint = fetch_together(source, encoder.dtype)
    origin = origin_of_weights(job_config, folder)
    if origin is not None:
        check_fingerprint(origin, encoder, fingerprint)
    # The record of a run's own weights stays as it was first written.
    if dist.get_rank() == 0 and (origin != folder or read_record(folder) is None):
        write_record(folder, source, encoder, fingerprint)
    if not encoder.frozen or features is not None:
        return None
    module = load_text_encoder(encoder, "cpu", folder)
    gib = sum(parameter.nbytes for parameter in module.parameters()) / 2**30
    sharded = shard_if_large(module, encoder, parallel_dims)
    logger.info(
        f"text encoder: {encoder.model}, {gib:.2f} GiB in {encoder.dtype}, frozen, "
        f"{'sharded' if sharded else 'replicated on every rank'}"
    )
    return module.to(device)


def stored_text_features(
    dataset: Dataset, tokenizer: SubwordTokenizer, job_config: JobConfig
) -> TextFeatures:
    """The stored features of the training data. Called by every rank of a job, or by a process alone."""
    encoder, max_tokens = job_config.encoder, job_config.data.max_text_tokens
    source = find_source(encoder.model, folder=Path(job_config.job.dump_folder))

    def find_kind(rank: int) -> FeatureKind | None:
        if rank != 0:  # the fingerprint needs a pass over many gigabytes of weights
            return None
        return with_stored_fingerprint(dataset, feature_kind(encoder, tokenizer, source))

    opened: list[TextFeatures] = []
    with long_timeout_group() as group:
        kind = run_on_all_ranks(find_kind, "find the text encoder", group)[0]
        assert kind is not None
        run_on_all_ranks(
            lambda rank: opened.append(open_text_features(dataset, kind)),
            "open the text features",
            group,
        )
    [features] = opened
    longest = longest_text(source)
    left_out = np.flatnonzero((features.tokens > longest) & (features.tokens <= max_tokens))
    if len(left_out):
        raise InputError(
            f"[data] max_text_tokens = {max_tokens}, but texts of more than {longest} tokens have "
            f"no stored features, as sample '{dataset.sample_id(int(left_out[0]))}'; lower it to "
            f"{longest}, or set [encoder] cache_features = false"
        )
    return features


def fetch_together(source: HFEncoderSpec, dtype: str) -> str:
    """Downloads the weights where they are missing; returns the encoder's fingerprint.

    One rank per machine downloads, and one rank of all reads the files.
    """
    with long_timeout_group() as group:
        downloads = os.environ.get("LOCAL_RANK", "0") == "0"
        run_on_all_ranks(
            lambda rank: fetch_weights(source.model) if downloads else None,
            f"fetch {source.model}",
            group,
        )
        found = run_on_all_ranks(
            lambda rank: source.fingerprint(dtype) if rank == 0 else "",
            f"read {source.model}",
            group,
        )
    return found[0]


def shard_if_large(
    module: PretrainedTextEncoder, encoder: Encoder, parallel_dims: ParallelDims
) -> bool:
    """Shards a frozen encoder (FSDP2) if its weights exceed `fsdp_min_gib`; returns whether it did."""
    size = sum(parameter.nbytes for parameter in module.parameters())
    if not parallel_dims.fsdp_enabled or size <= encoder.fsdp_min_gib * 2**30:
        return False
    mesh = parallel_dims.get_mesh("fsdp")
    for unit in (*blocks_of(module.core), module):
        # By default the last unit stays gathered until the backward pass, and there is none.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return True
