"""Checks of what a batch is made of: `[data]` and the texts."""

from torchtitan.models.dit_tts.added_tokens import MAX_ADDED
from torchtitan.models.dit_tts.config.data_sections import MAX_BUCKETS, Data
from torchtitan.models.dit_tts.config.job_config import (
    CONDITIONING_FIELDS,
    DURATION_FLAVOR,
    LEARNED_SUBWORDS,
    JobConfig,
    is_pretrained,
)
from torchtitan.models.dit_tts.errors import require


def check_data(data: Data, global_batch: int, dp_degree: int, accumulation: int) -> None:
    """Mistakes in `[data]` that show without opening the data."""
    blocks = dp_degree * accumulation
    edges, sizes = data.bucket_frames, data.bucket_batch_sizes
    require(
        len(sizes) in (0, len(edges)),
        f"[data] bucket_batch_sizes has {len(sizes)} numbers and bucket_frames {len(edges)}; give one for "
        f"each bucket, or none to have them chosen",
    )
    require(
        all(size > 0 and size % blocks == 0 for size in sizes),
        f"[data] bucket_batch_sizes = {sizes}, but each must be a positive multiple of {dp_degree} "
        f"data-parallel ranks x {accumulation} accumulation steps = {blocks}",
    )
    require(
        not sizes or sizes[-1] == global_batch,
        f"[data] bucket_batch_sizes ends with {sizes[-1:]}, but [training] global_batch_size comes to "
        f"{global_batch} samples of the longest bucket; set both alike",
    )
    require(
        bool(sizes) or data.batch_multiple % blocks == 0,
        f"[data] batch_multiple = {data.batch_multiple} cannot be divided among {dp_degree} "
        f"data-parallel ranks x {accumulation} accumulation steps; set it to a multiple of {blocks} "
        f"that divides global_batch_size",
    )
    require(
        bool(sizes) or global_batch % data.batch_multiple == 0,
        f"[training] global_batch_size comes to {global_batch} samples, which is not a multiple of "
        f"[data] batch_multiple = {data.batch_multiple}; change one of them",
    )
    require(
        data.max_speaker_frames % data.speaker_patch_size == 0,
        f"[data] max_speaker_frames = {data.max_speaker_frames} is not a multiple of "
        f"speaker_patch_size = {data.speaker_patch_size}; set it to one",
    )
    require(
        len(edges) <= MAX_BUCKETS and all(low < high for low, high in zip([0, *edges], edges)),
        f"[data] bucket_frames = {edges}, but it must be up to {MAX_BUCKETS} positive lengths in "
        f"ascending order, or empty to have them chosen",
    )
    require(
        not edges or edges[-1] <= data.max_frames,
        f"[data] bucket_frames ends at {edges[-1:]}, above max_frames = {data.max_frames}; lower the "
        f"one or raise the other",
    )
    datasets = 1 if isinstance(data.path, str) else len(data.path)
    require(
        len(data.weights) in (0, datasets),
        f"[data] weights has {len(data.weights)} numbers and path {datasets} datasets; give one for "
        f"each, or none to take each dataset as it is",
    )
    require(
        data.num_workers == 0 or data.prefetch_batches > 0,
        f"[data] prefetch_batches = 0 with num_workers = {data.num_workers}, but workers need at least "
        f"1; raise it or set num_workers = 0",
    )


def check_packed(config: JobConfig, global_batch: int, blocks: int) -> None:
    """blocks: micro-batches of a global batch, on all ranks."""
    data = config.data
    if data.batching != "packed":
        return
    require(
        not data.bucket_frames,
        f"[data] bucket_frames = {data.bucket_frames} with batching = 'packed', which has no buckets; leave "
        f"bucket_frames and bucket_batch_sizes empty",
    )
    require(
        global_batch % (blocks * data.longest_per_row) == 0,
        f"[data] longest_per_row = {data.longest_per_row}, but a micro-batch of packed rows has [training] "
        f"global_batch_size {global_batch} / {blocks} = {global_batch / blocks:g} samples of the longest "
        f"length, which is not a multiple of it; change one of them",
    )
    require(
        config.model.flavor != DURATION_FLAVOR and not config.megatron.sequence_parallel,
        f"[data] batching = 'packed' with [model] flavor = {config.model.flavor!r} and [megatron] "
        f"sequence_parallel = {config.megatron.sequence_parallel}: neither the duration model nor sequence "
        f"parallelism takes packed rows; set batching to 'buckets'",
    )
    require(
        data.latent_channels % 2 == 0,
        f"[data] latent_channels = {data.latent_channels} with batching = 'packed', whose noise is drawn in "
        f"pairs within a frame; set batching to 'buckets'",
    )


def check_text(config: JobConfig) -> None:
    encoder, data = config.encoder, config.data
    pretrained = is_pretrained(encoder.model)
    lengths = len(data.bucket_frames) or data.num_buckets
    require(
        not config.objective.loss_on_padding or (data.batching == "buckets" and lengths == 1),
        f"[objective] loss_on_padding = true with [data] batching = {data.batching!r} and rows of {lengths} lengths, "
        f"but such a model learns where speech ends from padding up to one length; set batching = 'buckets' and "
        f"num_buckets = 1",
    )
    require(
        config.model.text_positions == "none" or not config.objective.loss_on_padding,
        "[model] text_positions = 'aligned' with [objective] loss_on_padding = true: positions follow from "
        "the length of the speech, which such a model decides itself; set one of them to its default",
    )
    require(
        config.model.text_positions == "none" or data.on_too_long != "crop",
        "[model] text_positions = 'aligned' with [data] on_too_long = 'crop': a cropped utterance keeps all its "
        "text, whose words would be placed wrongly; set on_too_long to 'drop', or text_positions to 'none'",
    )
    require(
        not pretrained or "/" in encoder.model,
        f"[encoder] model = {encoder.model!r} is not known; allowed are 'bytes', 'chars', 'phones:LANGUAGE' "
        f"such as 'phones:en-us', 'subwords:NAME' of a tokenizer, a folder of a pretrained encoder, or a name of the Hugging Face hub such as 'google/t5gemma-2-270m-270m'",
    )
    require(
        not encoder.convention or config.model.text_positions == "none",
        f"[encoder] convention = {encoder.convention!r} with [model] text_positions = 'aligned', which needs texts as "
        f"they are; set text_positions to 'none'",
    )
    require(
        encoder.convention != "echo" or encoder.model == "bytes",
        f"[encoder] convention = 'echo' with model = {encoder.model!r}, but Echo-TTS reads bytes; set model to 'bytes'",
    )
    require(
        encoder.convention != "irodori" or encoder.model.startswith(LEARNED_SUBWORDS),
        f"[encoder] convention = 'irodori' with model = {encoder.model!r}, but Irodori-TTS reads the pieces of a "
        f"tokenizer; set model to 'subwords:NAME'",
    )
    tokens = encoder.added_tokens
    require(
        len(set(tokens)) == len(tokens) <= MAX_ADDED and all(t and t == t.strip() for t in tokens),
        f"[encoder] added_tokens = {tokens}, but they must be at most {MAX_ADDED} different texts without "
        f"blanks around them, such as ['[S1]', '(laugh)']",
    )
    require(
        set(data.conditioning) <= set(CONDITIONING_FIELDS)
        and len(set(data.conditioning)) == len(data.conditioning),
        f"[data] conditioning = {data.conditioning}; allowed are {', '.join(CONDITIONING_FIELDS)}, each "
        f"once",
    )
