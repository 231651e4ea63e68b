"""Exact FLOPs of the model, as `torch.utils.flop_counter` counts them on the meta device.

A multiply and an add are two operations; only matmuls and attention count. Attention over K keys costs
4·T·K·D and is never halved: the decoder's is not causal, and the speaker encoder's causal one is counted
in full, as the counter does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs, TextEncoderSizes


@dataclass(frozen=True)
class Lengths:
    """Lengths of one sample: padded ones for executed FLOPs, real ones for useful FLOPs."""

    frames: int
    text_tokens: int
    speaker_frames: int
    """before patching"""

    caption_tokens: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of one rank's micro-batch."""

    shape: tuple[int, ...]
    """padded (rows, frames, text tokens, speaker frames) and, with captions, their tokens"""

    lengths: Sequence[tuple[int, ...]]
    """real frames, text tokens, speaker frames and, with captions, their tokens of each sample"""

    text_rows: Sequence[tuple[int, int]] = ()
    """(rows, tokens) of each pass through a pretrained text encoder"""

    packed_slots: int = 0
    """samples that the one row of a packed batch could have; 0: a row has one"""


def _encoder_blocks(n_layers: int, length: int, dim: int, mlp_dim: int) -> int:
    return n_layers * (10 * length * dim**2 + 4 * length**2 * dim + 6 * length * dim * mlp_dim)


def learned_encoders(
    args: DiTTTSModelArgs, lengths: Lengths
) -> Iterator[tuple[int, int, int, int]]:
    """(blocks, positions, width, MLP width) of the speaker encoder, and of learned encoders of text and caption."""
    c, width = args.speaker_dim, args.text_dim
    if args.speaker_reference:
        yield args.speaker_n_layers, _speaker_patches(args, lengths), c, args.speaker_mlp_dim
    if args.text_vocab_size:
        yield args.text_n_layers, lengths.text_tokens, width, args.text_mlp_width
    if args.max_caption_tokens:
        yield args.caption_n_layers, lengths.caption_tokens, c, args.speaker_mlp_dim


def _speaker_patches(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    return -(-lengths.speaker_frames // args.speaker_patch_size) * args.speaker_reference


def speaker_keys(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """Keys of the reference, its patches, also a partial one, and the mean of a bidirectional encoder; and of the caption."""
    reference = _speaker_patches(args, lengths) + int(
        args.speaker_reference and args.speaker_bidirectional
    )
    return reference + lengths.caption_tokens


def _condition_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of encoding one sample's text and speaker, without a pretrained text encoder."""
    projected = 2 * lengths.text_tokens * args.text_dim * args.speaker_dim
    flops = projected if args.text_projection else 0
    flops += _speaker_input_flops(args, lengths)
    return flops + sum(_encoder_blocks(*sizes) for sizes in learned_encoders(args, lengths))


def forward_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample's forward pass, without a pretrained text encoder."""
    text, c = lengths.text_tokens, args.speaker_dim
    flops = _condition_flops(args, lengths)
    if args.task == "duration":
        flops += args.n_layers * args.dim * (6 * text * args.mlp_dim + 4 * c)
        return flops + 2 * text * args.dim * (args.text_key_dim + 1)
    T, D = lengths.frames, args.dim
    flops += divisible_flops(args, lengths) + args.n_layers * 24 * D * args.adaln_rank
    flops += 4 * T * args.latent_channels * D  # input and output
    return flops + 2 * args.timestep_dim * D + 8 * D**2


def _speaker_input_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    width = args.speaker_patch_size * args.latent_channels
    return 2 * _speaker_patches(args, lengths) * width * args.speaker_dim


def divisible_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample in the blocks' forward pass that tensor parallelism divides among its ranks."""
    text, speaker = lengths.text_tokens, speaker_keys(args, lengths)
    products, attention = _block_flops(args, lengths)
    key_values = 4 * args.dim * (text * args.text_key_dim + speaker * args.speaker_dim)
    return args.n_layers * (products + attention + key_values)


def _block_flops(args: DiTTTSModelArgs, lengths: Lengths) -> tuple[int, int]:
    """(products of the frames, attention) of a block's forward pass."""
    T, D = lengths.frames, args.dim
    keys = T + lengths.text_tokens + speaker_keys(args, lengths)
    return 10 * T * D**2 + 6 * T * D * args.mlp_dim, 4 * T * keys * D


def training_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample's forward and backward pass, without recomputation and a pretrained text encoder.

    The backward pass costs twice the forward, less the gradients of inputs that need none: latents, timestep
    embedding, reference latents, and text features that nothing trained computes.
    """
    if args.lora_rank:
        return forward_flops(args, lengths) + _lora_flops(args, lengths)
    c = args.speaker_dim
    saved = 0
    if args.task == "speech":
        saved = 2 * (lengths.frames * args.latent_channels + args.timestep_dim) * args.dim
    saved += _speaker_input_flops(args, lengths)
    if not (args.text_vocab_size or args.text_encoder or args.condition_tokens):
        saved += 2 * lengths.text_tokens * args.text_dim * c
    return 3 * forward_flops(args, lengths) - saved


def _lora_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample that low-rank updates have in addition to the plain forward pass: their own, and the backward
    pass, in which frozen weights have no gradients. The blocks' input has one, and nothing that lies before it."""
    T, D, F, r = lengths.frames, args.dim, args.mlp_dim, args.lora_rank
    text, speaker = lengths.text_tokens, speaker_keys(args, lengths)
    products, attention = _block_flops(args, lengths)
    flops = args.n_layers * (products + 2 * attention) + 2 * T * args.latent_channels * D
    of_frames = T * r * (26 * D + 6 * F)
    into = 4 * r * (text * args.text_key_dim + speaker * args.speaker_dim)
    out_of = 4 * r * D * (text + speaker)
    return flops + args.n_layers * (3 * of_frames + 2 * into + 3 * out_of)


def teacher_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of a frozen teacher for one sample: conditions are encoded once. Guidance hides keys but computes them."""
    if not args.teacher_passes:
        return 0
    conditions = _condition_flops(args, lengths)
    return conditions + args.teacher_passes * (forward_flops(args, lengths) - conditions)


def _step_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample in a training step, without recomputation and a pretrained text encoder."""
    return training_flops(args, lengths) + teacher_flops(args, lengths)


def repeated_flops(
    args: DiTTTSModelArgs, lengths: Lengths, blocks: Mapping[str, int], tensor: int = 1
) -> int:
    """FLOPs of one sample that activation checkpointing repeats in the blocks of decoder and learned encoders.

    By operation, attention and every second matmul are saved. K and V of the speaker, the projection after
    attention, the MLP's down projection and AdaLN's batched matmuls are repeated.

    Args:
        blocks: of `infra.parallelize.blocks_by_checkpointing`; the encoders' have the same proportions.
        tensor: ranks that share the decoder's blocks; each computes the encoders.
    """
    D = args.dim
    one_less = replace(args, n_layers=args.n_layers - 1)
    not_saved = 2 * lengths.frames * D * (D + args.mlp_dim) + 24 * D * args.adaln_rank
    not_saved += 4 * D * args.speaker_dim * speaker_keys(args, lengths)
    repeated = {
        "full": forward_flops(args, lengths) - forward_flops(one_less, lengths),
        "selective": not_saved,
    }
    encoders = {"full": 0, "selective": 0}
    for n_layers, length, dim, mlp_dim in learned_encoders(args, lengths):
        encoders["full"] += _encoder_blocks(n_layers, length, dim, mlp_dim)
        encoders["selective"] += n_layers * 2 * length * dim * (dim + mlp_dim)
    return sum(
        count * repeated.get(kind, 0) // tensor + count * encoders.get(kind, 0) // args.n_layers
        for kind, count in blocks.items()
    )


def text_encoder_flops(sizes: TextEncoderSizes, rows: int, tokens: int) -> int:
    """FLOPs of a pretrained text encoder for `rows` rows of `tokens` tokens: forward, and backward if
    it is trained. Sliding-window attention is counted in full, as it is computed."""
    forward = 2 * sizes.matmul_parameters * tokens
    forward += 4 * sizes.n_layers * sizes.attention_dim * tokens**2
    return rows * forward * (3 if sizes.trained else 1)


def executed_flops(args: DiTTTSModelArgs, batch: MicroBatch) -> int:
    """Training FLOPs of a micro-batch's padded shapes, with the pretrained text encoder."""
    rows, *padded = batch.shape
    if batch.packed_slots:
        flops = _packed_flops(args, batch)
    else:
        flops = rows * _step_flops(args, Lengths(*padded))
    if args.text_encoder_sizes is not None:
        flops += sum(text_encoder_flops(args.text_encoder_sizes, *rows) for rows in batch.text_rows)
    return flops


def _packed_flops(args: DiTTTSModelArgs, batch: MicroBatch) -> int:
    """Training FLOPs of all positions and slots of a packed batch, where attention stays within the samples."""

    def flops(*lengths: int) -> int:
        return _step_flops(args, Lengths(*lengths))

    padding = [
        size - sum(lengths)
        for size, lengths in zip(batch.shape[1:], zip(*batch.lengths, strict=True), strict=True)
    ]
    # A polynomial of degree 2 in the lengths: this is the linear part, as padding has no attention.
    doubled, nothing = flops(*(2 * length for length in padding)), flops(0, 0, 0)
    linear = 2 * flops(*padding) - (doubled + 3 * nothing) // 2
    empty = batch.packed_slots - len(batch.lengths)
    executed = sum(flops(*lengths) for lengths in batch.lengths) + linear + empty * nothing
    if args.max_caption_tokens:  # captions are padded

        def attention(tokens: int) -> int:
            whole, twice = flops(0, 0, 0, tokens), flops(0, 0, 0, 2 * tokens)
            return (twice - 2 * whole + nothing) // 2

        executed += batch.packed_slots * attention(batch.shape[-1] // batch.packed_slots)
        executed -= sum(attention(lengths[-1]) for lengths in batch.lengths)
    return executed


def useful_flops(args: DiTTTSModelArgs, batch: MicroBatch) -> int:
    """Training FLOPs of a micro-batch's real lengths, with the pretrained text encoder."""
    flops = sum(_step_flops(args, Lengths(*lengths)) for lengths in batch.lengths)
    if args.text_encoder_sizes is not None:
        # Conditioning tokens do not pass through it, but they are too few to count.
        sizes = args.text_encoder_sizes
        flops += sum(text_encoder_flops(sizes, 1, tokens) for _, tokens, *_ in batch.lengths)
    return flops


def language_model_flops(args: DiTTTSModelArgs, parameters: int, length: int) -> int:
    """The 6N rule for language models (Kaplan et al. 2020; Chowdhery et al. 2022): every parameter computes
    at each of `length` positions."""
    return 6 * parameters * length + 12 * args.n_layers * args.dim * length**2
