"""Training FLOPs by what they are spent on; together exactly `model.flops.training_flops`."""

from dataclasses import dataclass, fields

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, text_encoder_flops


@dataclass(frozen=True)
class FlopsSplit:
    """FLOPs of forward and backward, without recomputation."""

    linear: int
    """the decoder's products on latent frames: projections, MLP, input and output"""

    attention: int
    """the decoder's attention over self, text and speaker keys"""

    modulation: int
    """low-rank AdaLN, once a sample and block"""

    conditioning: int
    """timestep, speaker encoder, text projection, a learned text encoder, and K, V of text and speaker
    in each block"""

    text_encoder: int
    """a pretrained text encoder; not in `training_flops`"""

    @property
    def model(self) -> int:
        """Those that `training_flops` counts."""
        return self.linear + self.attention + self.modulation + self.conditioning

    @property
    def total(self) -> int:
        return self.model + self.text_encoder

    def __add__(self, other: "FlopsSplit") -> "FlopsSplit":
        return FlopsSplit(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> "FlopsSplit":
        return FlopsSplit(*(getattr(self, f.name) * times for f in fields(self)))


def split_flops(args: DiTTTSModelArgs, lengths: Lengths) -> FlopsSplit:
    """FLOPs of one sample, padded or real as its lengths are; see `model.flops` for the terms."""
    T, text = lengths.frames, lengths.text_tokens
    patch = args.speaker_patch_size
    speaker = -(-lengths.speaker_frames // patch)
    D, c, channels = args.dim, args.speaker_dim, args.latent_channels
    blocks = args.n_layers
    project_in = 2 * T * channels * D
    linear = 3 * (blocks * (10 * T * D**2 + 6 * T * D * args.mlp_dim) + 2 * project_in)
    attention = 3 * blocks * 4 * T * (T + text + speaker) * D
    modulation = 3 * blocks * 24 * D * args.adaln_rank

    timestep_in = 2 * args.timestep_dim * D
    text_in = 2 * text * args.text_dim * c
    speaker_in = 2 * speaker * patch * channels * c
    conditioning = 3 * (timestep_in + 8 * D**2 + text_in + speaker_in)
    conditioning += 3 * blocks * 4 * D * c * (text + speaker)
    conditioning += 3 * _encoder(args.speaker_n_layers, speaker, c, args.speaker_mlp_dim)
    if args.text_vocab_size:
        width = args.text_dim
        conditioning += 3 * _encoder(args.text_n_layers, text, width, (11 * width) // 4)
    # Inputs that nothing trained makes have no gradient.
    text_is_made = args.text_vocab_size or args.text_encoder or args.condition_ids
    conditioning -= timestep_in + speaker_in + (0 if text_is_made else text_in)
    sizes = args.text_encoder_sizes
    return FlopsSplit(
        linear=linear - project_in,
        attention=attention,
        modulation=modulation,
        conditioning=conditioning,
        text_encoder=text_encoder_flops(sizes, 1, text) if sizes is not None and text else 0,
    )


def _encoder(n_layers: int, length: int, dim: int, mlp_dim: int) -> int:
    """Forward FLOPs of an encoder's gated blocks."""
    return n_layers * (10 * length * dim**2 + 4 * length**2 * dim + 6 * length * dim * mlp_dim)
