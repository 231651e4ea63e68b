"""Sizes of the model. Shapes in this package: B batch, T latent frames, C latent channels,
L text tokens, S speaker frames (P after patching), D decoder width, H heads."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from torchtitan.protocols.model import BaseModelArgs


@dataclass
class TextEncoderSizes:
    """Sizes of a pretrained text encoder that decide its FLOPs."""

    matmul_parameters: int
    n_layers: int
    attention_dim: int
    """heads times head width"""
    trained: bool
    """whether it has a backward pass"""


@dataclass
class DiTTTSModelArgs(BaseModelArgs):
    task: str = "speech"
    """Predicts latents (speech, `DiTTTSModel`) or their number (duration, `DurationModel`)"""

    dim: int = 1280
    """Decoder width D"""

    n_layers: int = 24
    """Decoder blocks"""

    n_heads: int = 10
    """Decoder heads; the first half of them is rotated (RoPE)"""

    mlp_dim: int = 3520
    """Hidden width of the decoder's gated MLP"""

    speaker_dim: int = 768
    """Width of the speaker encoder, of the speaker keys' input, and of the text keys' with `text_projection`"""

    speaker_n_layers: int = 8
    """Blocks of the speaker encoder"""

    speaker_n_heads: int = 6
    """Heads of the speaker encoder, all rotated"""

    speaker_mlp_dim: int = 2112
    """Hidden width of the speaker encoder's gated MLP"""

    speaker_patch_size: int = 4
    """Speaker frames stacked into one key"""

    speaker_partial_patches: bool = True
    """True if a reference's last frames that fill no patch are a key, padded with zeros; false: they are dropped"""

    speaker_bidirectional: bool = False
    """True if each patch sees all of its reference, whose mean is then one more key; false: only those before it"""

    speaker_reference: bool = True
    """True if the model has a speaker encoder; false: a caption takes the reference's place"""

    latent_channels: int = 128
    """Width C of a latent frame"""

    text_dim: int = 640
    """Width of the text features: the frozen encoder's hidden size, or the learned encoder's width"""

    text_vocab_size: int = 0
    """Ids of the learned text encoder inside the model; 0: there is none"""

    text_n_layers: int = 4
    """Blocks of the learned text encoder"""

    text_n_heads: int = 4
    """Heads of the learned text encoder, all rotated"""

    text_mlp_dim: int = 0
    """Hidden width of the learned text encoder's gated MLP; 0: 2.75 times its width"""

    text_projection: bool = True
    """True if a linear layer and a norm bring the text features to `speaker_dim`; false: the text keys read the
    learned encoder's features"""

    max_caption_tokens: int = 0
    """Longest caption, which a learned encoder as wide as the speaker's reads; 0: there is none"""

    caption_vocab_size: int = 256
    """Ids of the caption encoder"""

    caption_n_layers: int = 2
    """Blocks of the caption encoder"""

    text_encoder: Callable[[], nn.Module] | None = None
    """Builds the pretrained text encoder that is trained inside the model; None: there is none, and without a
    learned one the features come from outside"""

    text_encoder_starts: bool = True
    """True if it starts from the pretrained weights; false: a checkpoint of the run has them"""

    text_encoder_sizes: TextEncoderSizes | None = None
    """Sizes of a pretrained text encoder that runs in training, inside the model or outside"""

    first_condition_id: int = 0
    """First id of the conditioning tokens that a pretrained encoder does not know"""

    condition_tokens: int = 0
    """Number of conditioning tokens; each has a learned embedding among the text features"""

    lora_rank: int = 0
    """Rank of the low-rank updates that alone are trained; 0: all is. The network itself has none of them"""

    adaln_rank: int = 256
    """Rank of the low-rank AdaLN"""

    timestep_dim: int = 512
    """Width of the sinusoidal timestep embedding"""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies"""

    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm"""

    text_positions: str = "none"
    """Positions of the text's keys in the rotated heads: none, or each at its token's position in the speech
    (aligned)"""

    teacher_passes: int = 0
    """Passes of each sample through the decoder of a frozen teacher in training, which has the same sizes; 0: there is
    none"""

    attention: str = "auto"
    """Kernel of the decoder's attention, one of attention_backends.BACKENDS; all compute the same"""

    tuned: "DiTTTSModelArgs | None" = None
    """Sizes at which the learning rates of [optimizer] base_dim were found; None: they are not known, or nothing asks"""

    @property
    def text_mlp_width(self) -> int:
        """Hidden width of the learned text encoder's gated MLP."""
        return self.text_mlp_dim or (11 * self.text_dim) // 4

    @property
    def text_key_dim(self) -> int:
        """Width of the text keys' input."""
        return self.speaker_dim if self.text_projection else self.text_dim
