"""Data loader, tokenizer and text encoder that replace the real ones when [benchmark] is enabled."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatch, GlobalBatchSampler
from torchtitan.models.dit_tts.data.buckets import Selection
from torchtitan.models.dit_tts.data.build import describe
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, PackedSampler
from torchtitan.models.dit_tts.infra.collectives import run_on_all_ranks
from torchtitan.models.dit_tts.run.benchmark.synthetic import RandomTokens, synthetic_data
from torchtitan.models.dit_tts.text.encoder_record import write_record
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.vocabulary import BYTE_VOCAB_SIZE

_WEIGHT_STD = 0.05


class WarmUpFirst(GlobalBatchSampler):
    """The usual order after a warm-up: a few batches of every bucket in turn, longest first.

    Each shape is then compiled, and the maximum of memory allocated, before timing starts.
    """

    def __init__(
        self,
        bucket_samples: Sequence[np.ndarray],
        batch_sizes: Sequence[int],
        seed: int,
        warmup_steps: int,
    ):
        super().__init__(bucket_samples, batch_sizes, seed)
        self._bucket_samples = bucket_samples
        filled = [bucket for bucket, samples in enumerate(bucket_samples) if len(samples)]
        self.warm_up = tuple(bucket for bucket in reversed(filled) for _ in range(warmup_steps))
        """bucket of each batch of the warm-up"""

    def batch(self, number: int) -> GlobalBatch:
        if number >= len(self.warm_up):
            return replace(super().batch(number - len(self.warm_up)), number=number)
        bucket = self.warm_up[number]
        samples = np.resize(self._bucket_samples[bucket], self.batch_sizes[bucket])
        return GlobalBatch(number, 0, bucket, samples)


def build_synthetic_tokenizer(job_config: JobConfig) -> RandomTokens:
    """A tokenizer of random ids; sets `job_config.encoder.vocab_size` as `build_tokenizer` does.

    Writes a pretrained encoder's config to the run folder, from which the model takes its sizes, so
    nothing is downloaded.
    """
    encoder, data = job_config.encoder, job_config.data
    fields = data.conditioning
    if is_pretrained(encoder.model):
        source = find_source(encoder.model, download=False)
        text_ids = source.vocab_size
        folder, record = Path(job_config.job.dump_folder), (source.model, source.config.to_dict())
        run_on_all_ranks(
            lambda rank: write_record(folder, *record, encoder, "") if rank == 0 else None,
            "write the text encoder's config",
        )
    else:
        # There are no texts to collect the characters from.
        text_ids = encoder.vocab_size - len(fields) if encoder.vocab_size else BYTE_VOCAB_SIZE
    tokenizer = RandomTokens(text_ids, fields, data.max_text_tokens, data.seed)
    encoder.vocab_size = tokenizer.vocab_size
    return tokenizer


def build_synthetic_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: RandomTokens, job_config: JobConfig
) -> LatentDataLoader:
    """The loader of synthetic samples, with the buckets and the order that real data of these lengths
    would have. Sets [training] steps, as [data] epochs does."""
    benchmark, data, training = job_config.benchmark, job_config.data, job_config.training
    dataset, policy = synthetic_data(job_config, dp_world_size)
    order: GlobalBatchSampler
    if isinstance(policy, PackedPolicy):  # all batches have one shape
        order = PackedSampler(np.arange(len(dataset)), policy, data.seed)
        warm_up = benchmark.warmup_steps
    else:
        bucket = policy.bucket_of(dataset.frames)
        inside = [np.flatnonzero(bucket == number) for number in range(len(policy.edges))]
        order = WarmUpFirst(inside, policy.batch_sizes, data.seed, benchmark.warmup_steps)
        warm_up = len(order.warm_up)
    training.steps = warm_up + benchmark.steps
    loader = LatentDataLoader(
        dataset,
        order,
        policy,
        tokenizer,
        data,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        accumulation_steps=batch_split(training, dp_world_size)[1],
    )
    if dp_rank == 0:
        everything = Selection(np.arange(len(dataset)), dataset.frames, 0, 0)
        for line in describe(dataset, everything, loader):
            logger.info(line)
        logger.info(
            f"benchmark: synthetic data; {warm_up} steps of warm-up, "
            f"{benchmark.warmup_steps} in each shape"
        )
    return loader


def build_random_encoder(
    job_config: JobConfig, device: torch.device
) -> PretrainedTextEncoder | None:
    """The frozen text encoder with random weights, which take as much time as its own.

    None if the model has a learned encoder.
    """
    encoder = job_config.encoder
    if not is_pretrained(encoder.model):
        return None
    module = PretrainedTextEncoder(find_source(encoder.model, download=False))
    generator = torch.Generator().manual_seed(job_config.data.seed)
    # T5Gemma2 multiplies by 1 + weight in its norms, T5 and others by the weight.
    norm = 0.0 if module.source.family == "t5gemma2" else 1.0
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.fill_(norm)
            else:
                parameter.normal_(0.0, _WEIGHT_STD, generator=generator)
    module = module.to(TORCH_DTYPE_MAP[encoder.dtype]).requires_grad_(False)
    return module.to(device)
