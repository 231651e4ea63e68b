"""Checks of what a batch is made of: `[data]` and the texts."""

from itertools import pairwise

from torchtitan.models.dit_tts.added_tokens import MAX_ADDED
from torchtitan.models.dit_tts.config.data_sections import MAX_BUCKETS
from torchtitan.models.dit_tts.config.job_config import (
    CONDITIONING_FIELDS,
    DURATION_FLAVOR,
    JobConfig,
    is_pretrained,
)
from torchtitan.models.dit_tts.config.keys import conflict
from torchtitan.models.dit_tts.errors import InputError


def check_data(config: JobConfig, global_batch: int, dp_degree: int, accumulation: int) -> None:
    """Mistakes in `[data]` that show without opening the data."""
    data, blocks = config.data, dp_degree * accumulation
    edges = data.bucket_frames
    if data.batch_multiple % blocks:
        why = (
            f"it cannot be divided among {dp_degree} data-parallel ranks x {accumulation} accumulation steps; set it to "
            f"a multiple of {blocks} that divides global_batch_size"
        )
        raise conflict(config, "data.batch_multiple", why)
    if global_batch % data.batch_multiple:
        raise InputError(
            f"[training] global_batch_size comes to {global_batch} samples, not a multiple of [data] batch_multiple = "
            f"{data.batch_multiple}; change one of them"
        )
    if data.max_speaker_frames % data.speaker_patch_size:
        why = "the first must be a multiple of the second"
        raise conflict(config, "data.max_speaker_frames data.speaker_patch_size", why)
    if len(edges) > MAX_BUCKETS or any(low >= high for low, high in pairwise([0, *edges])):
        why = f"it must be up to {MAX_BUCKETS} positive lengths in ascending order, or empty"
        raise conflict(config, "data.bucket_frames", why)
    if edges and edges[-1] > data.max_frames:
        why = "the last bucket must not be above it; change one of them"
        raise conflict(config, "data.bucket_frames data.max_frames", why)
    datasets = 1 if isinstance(data.path, str) else len(data.path)
    if len(data.weights) not in (0, datasets):
        raise InputError(
            f"[data] weights has {len(data.weights)} numbers and path {datasets} datasets; give one for "
            f"each, or none to take each dataset as it is"
        )


def check_packed(config: JobConfig, global_batch: int, blocks: int) -> None:
    """blocks: micro-batches of a global batch, on all ranks."""
    data = config.data
    if data.batching != "packed":
        return
    if data.bucket_frames:
        why = "there are no buckets; leave bucket_frames empty"
        raise conflict(config, "data.batching data.bucket_frames", why)
    if global_batch % (blocks * data.longest_per_row):
        why = (
            f"a micro-batch has {global_batch} / {blocks} = {global_batch / blocks:g} samples of the longest "
            f"length, which is not a multiple of it; change one of them"
        )
        raise conflict(config, "data.batching data.longest_per_row", why)
    if config.model.flavor == DURATION_FLAVOR or config.megatron.sequence_parallel:
        why = "neither the duration model nor sequence parallelism takes packed rows; set batching to 'buckets'"
        raise conflict(config, "data.batching model.flavor megatron.sequence_parallel", why)
    if data.latent_channels % 2:
        why = "noise of packed rows is drawn in pairs within a frame; set batching to 'buckets'"
        raise conflict(config, "data.batching data.latent_channels", why)


def check_text(config: JobConfig) -> None:
    encoder, data = config.encoder, config.data
    aligned = config.model.text_positions == "aligned"
    lengths = len(data.bucket_frames) or data.num_buckets
    if config.objective.loss_on_padding and (data.batching == "packed" or lengths > 1):
        why = (
            f"rows of {lengths} lengths, but such a model learns where speech ends from padding up to one length; "
            f"set batching = 'buckets' and num_buckets = 1"
        )
        raise conflict(config, "objective.loss_on_padding data.batching", why)
    if aligned and config.objective.loss_on_padding:
        why = "positions follow from a length that such a model decides itself; set one to its default"
        raise conflict(config, "model.text_positions objective.loss_on_padding", why)
    if is_pretrained(encoder.model) and "/" not in encoder.model:
        why = (
            "is not known; allowed are 'bytes', 'chars', 'phones:en-us' or another language, 'subwords:NAME' of a "
            "tokenizer, a folder of a pretrained encoder, or a hub name such as 'google/t5gemma-2-270m-270m'"
        )
        raise conflict(config, "encoder.model", why)
    if encoder.convention and aligned:
        why = "aligned positions need texts as they are; set text_positions to 'none'"
        raise conflict(config, "encoder.convention model.text_positions", why)
    tokens, fields = encoder.added_tokens, data.conditioning
    if not len(set(tokens)) == len(tokens) <= MAX_ADDED or not all(
        t and t == t.strip() for t in tokens
    ):
        why = f"they must be at most {MAX_ADDED} different texts without blanks around them, such as '[S1]'"
        raise conflict(config, "encoder.added_tokens", why)
    if not set(fields) <= set(CONDITIONING_FIELDS) or len(set(fields)) != len(fields):
        why = f"allowed are {', '.join(CONDITIONING_FIELDS)}, each once"
        raise conflict(config, "data.conditioning", why)
