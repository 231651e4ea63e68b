"""Exact FLOPs of the model, as `torch.utils.flop_counter` counts them on the meta device.

A multiply and an add are two operations; only matrix products and attention count. Attention over
K keys costs 4·T·K·D and is never halved: the decoder's is not causal, and the speaker encoder's
causal one is counted whole, as the counter does.
"""

from dataclasses import dataclass

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs, TextEncoderSizes


@dataclass(frozen=True)
class Lengths:
    """Lengths of one sample, padded ones for executed FLOPs and real ones for useful FLOPs."""

    frames: int
    """latent frames"""

    text_tokens: int
    """text tokens"""

    speaker_frames: int
    """reference frames, before patching"""


def _encoder_blocks(n_layers: int, length: int, dim: int, mlp_dim: int) -> int:
    return n_layers * (10 * length * dim**2 + 4 * length**2 * dim + 6 * length * dim * mlp_dim)


def forward_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample's forward pass."""
    T, text = lengths.frames, lengths.text_tokens
    speaker = -(-lengths.speaker_frames // args.speaker_patch_size)
    keys = T + text + speaker
    D, c = args.dim, args.speaker_dim
    block = (
        10 * T * D**2
        + 6 * T * D * args.mlp_dim
        + 4 * T * keys * D
        + 4 * D * c * (text + speaker)
        + 24 * D * args.adaln_rank
    )
    total = args.n_layers * block
    total += 4 * T * args.latent_channels * D  # input and output
    total += 2 * args.timestep_dim * D + 8 * D**2  # timestep conditioning
    total += 2 * text * args.text_dim * c
    total += 2 * speaker * args.speaker_patch_size * args.latent_channels * c
    total += _encoder_blocks(args.speaker_n_layers, speaker, c, args.speaker_mlp_dim)
    if args.text_vocab_size:
        total += _encoder_blocks(args.text_n_layers, text, args.text_dim, (11 * args.text_dim) // 4)
    return total


def training_flops(args: DiTTTSModelArgs, lengths: Lengths) -> int:
    """FLOPs of one sample's forward and backward pass, without recomputation.

    The backward costs twice the forward, less the gradients of inputs that need none: latents,
    timestep embedding, reference latents and, unless something trained makes them, text features.
    """
    D, c = args.dim, args.speaker_dim
    speaker = -(-lengths.speaker_frames // args.speaker_patch_size)
    no_gradient = 2 * lengths.frames * args.latent_channels * D
    no_gradient += 2 * args.timestep_dim * D
    no_gradient += 2 * speaker * args.speaker_patch_size * args.latent_channels * c
    if not (args.text_vocab_size or args.text_encoder or args.condition_ids):
        no_gradient += 2 * lengths.text_tokens * args.text_dim * c
    return 3 * forward_flops(args, lengths) - no_gradient


def text_encoder_flops(sizes: TextEncoderSizes, rows: int, tokens: int) -> int:
    """FLOPs of a pretrained text encoder for `rows` rows of `tokens` tokens: forward, and backward
    where it is trained. A window of attention is counted whole, as it is computed."""
    forward = 2 * sizes.matmul_parameters * tokens
    forward += 4 * sizes.n_layers * sizes.attention_dim * tokens**2
    return rows * forward * (3 if sizes.trained else 1)
