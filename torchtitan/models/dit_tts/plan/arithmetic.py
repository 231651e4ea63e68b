"""The arithmetic of one optimizer step in the longest bucket, as far as it is known without data."""

from dataclasses import dataclass

from torchtitan.models.dit_tts.config.checks import accumulation_steps
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, text_encoder_flops, training_flops


@dataclass(frozen=True)
class StepArithmetic:
    """One optimizer step with samples as long as the limits allow."""

    ranks: int
    micro_batch: int
    """samples"""

    accumulation: int
    lengths: Lengths
    """padded, of every sample"""

    seconds: float
    """audio of one sample"""

    flops: int
    """training FLOPs of all ranks, without recomputation"""

    encoder_flops: int
    """those of a pretrained text encoder, in rows without padding"""

    @property
    def samples(self) -> int:
        return self.ranks * self.micro_batch * self.accumulation

    @property
    def frames(self) -> int:
        return self.samples * self.lengths.frames


def step_arithmetic(config: JobConfig, args: DiTTTSModelArgs, ranks: int) -> StepArithmetic:
    """Args:
    config: the run's, as upstream sees it: with a local batch size.
    args: the model's sizes.
    ranks: that see different data.
    """
    data = config.data
    lengths = Lengths(
        frames=data.bucket_frames[-1] if data.bucket_frames else data.max_frames,
        text_tokens=data.max_text_tokens,
        speaker_frames=data.max_speaker_frames,
    )
    micro_batch = config.training.local_batch_size
    accumulation = accumulation_steps(config, ranks)
    samples = ranks * micro_batch * accumulation
    encoder = args.text_encoder_sizes
    return StepArithmetic(
        ranks=ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
        lengths=lengths,
        seconds=lengths.frames / data.frames_per_second,
        flops=samples * training_flops(args, lengths),
        encoder_flops=text_encoder_flops(encoder, samples, lengths.text_tokens) if encoder else 0,
    )
