"""The frozen text encoder of a training run, outside the model and its checkpoints."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.collectives import long_timeout_group, run_on_all_ranks
from torchtitan.models.dit_tts.text.build_tokenizer import origin_of_weights
from torchtitan.models.dit_tts.text.encoder_record import (
    check_fingerprint,
    read_record,
    write_record,
)
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, fetch_weights, find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder
from torchtitan.tools.logging import logger


def build_frozen_encoder(
    job_config: JobConfig, device: torch.device
) -> PretrainedTextEncoder | None:
    """The encoder that a run uses outside the model, if there is one. Records a pretrained encoder, frozen or not,
    in the run folder."""
    encoder, folder = job_config.encoder, Path(job_config.job.dump_folder)
    if not is_pretrained(encoder.model):
        return None
    source = find_source(encoder.model, folder=folder)
    longest = job_config.data.max_text_tokens
    if source.max_tokens is not None and longest > source.max_tokens:
        raise InputError(
            f"[data] max_text_tokens = {longest}, but {encoder.model} has positions for "
            f"{source.max_tokens} tokens; lower it to that"
        )
    # The weights of a trained one are the checkpoint's.
    fingerprint = fetch_together(source, encoder.dtype) if encoder.frozen else ""
    origin = origin_of_weights(job_config, folder)
    if origin is not None:
        check_fingerprint(origin, encoder, fingerprint)
    # The record of a run's own weights stays as it was first written.
    if dist.get_rank() == 0 and (origin != folder or read_record(folder) is None):
        write_record(folder, source.model, source.config.to_dict(), encoder, fingerprint)
    if not encoder.frozen:
        return None
    module = load_text_encoder(encoder, "cpu", folder)
    gib = sum(parameter.nbytes for parameter in module.parameters()) / 2**30
    logger.info(
        f"text encoder: {encoder.model}, {gib:.2f} GiB in {encoder.dtype}, frozen, whole on every rank"
    )
    return module.to(device)


def fetch_together(source: HFEncoderSpec, dtype: str) -> str:
    """Downloads the weights where they are missing; returns the encoder's fingerprint.

    One rank per machine downloads, and one rank of all reads the files.
    """

    def fetch(rank: int) -> str:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            fetch_weights(source.model)
        return source.fingerprint(dtype) if rank == 0 else ""

    with long_timeout_group() as group:
        return run_on_all_ranks(fetch, f"fetch {source.model}", group)[0]
