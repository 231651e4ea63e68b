"""Shapes of a run's batches as far as they are known before its data are read.

Their lengths are taken to be those that [benchmark] describes, log-normal seconds, put into the very
buckets that data of these lengths would have.
"""

from dataclasses import dataclass

from torchtitan.models.dit_tts.benchmark.synthetic import (
    BYTES_PER_SECOND,
    SUBWORDS_PER_SECOND,
    SyntheticDataset,
)
from torchtitan.models.dit_tts.config.checks import batch_split
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.data.build import batch_policy
from torchtitan.models.dit_tts.model.flops import Lengths

_BEGIN_AND_END = 2


@dataclass(frozen=True)
class Bucket:
    """Batches of one static shape."""

    lengths: Lengths
    """padded"""

    micro_batch: int
    """samples of one rank"""

    share: float
    """of the steps"""

    useful_frames: float
    """share of its frames that are not padding"""


def estimated_buckets(config: JobConfig, ranks: int) -> list[Bucket]:
    """Shortest first.

    Raises:
        InputError: lengths that hardly any utterance can have within the config's limits.
    """
    data = config.data
    pretrained = is_pretrained(config.encoder.model)
    dataset = SyntheticDataset(
        config.benchmark,
        data,
        data.seed,
        SUBWORDS_PER_SECOND if pretrained else BYTES_PER_SECOND,
        _BEGIN_AND_END + len(data.conditioning),
    )
    global_batch_size, accumulation = batch_split(config.training, ranks)
    policy = batch_policy(
        data, global_batch_size, dataset.frames, dataset.reference_frames, dataset.tokens
    )
    steps = [n / size for n, size in zip(policy.sample_counts, policy.batch_sizes)]
    bucket = policy.bucket_of(dataset.frames)
    return [
        Bucket(
            lengths=Lengths(*shape),
            micro_batch=size // (ranks * accumulation),
            share=step / sum(steps),
            useful_frames=float(dataset.frames[bucket == number].mean()) / shape[0],
        )
        for number, (shape, size, step) in enumerate(
            zip(policy.shapes, policy.batch_sizes, steps, strict=True)
        )
        if step
    ]
