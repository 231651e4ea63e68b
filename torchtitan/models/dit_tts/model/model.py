"""The diffusion transformer: from noisy latents, time and conditions to a prediction per frame."""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.attention import JointAttention, KeyValue, rotated_groups
from torchtitan.models.dit_tts.model.attention_backends import (
    GuidedKeys,
    JointKeys,
    prepare_keys,
    prepare_packed_keys,
)
from torchtitan.models.dit_tts.model.conditions import ConditionedModel, Conditions
from torchtitan.models.dit_tts.model.layers import (
    GatedMLP,
    RMSNorm,
    positions_of,
    rope_table,
    timestep_embedding,
)
from torchtitan.models.dit_tts.model.operations import WithOperations
from torchtitan.models.dit_tts.streams import PackedStreams, Stream, valid_mask


class BlockCache(NamedTuple):
    """A block's results that depend on conditions and time alone, for samplers."""

    key_values: tuple[KeyValue, KeyValue]
    """of text and speaker, B rows"""

    modulation: torch.Tensor
    """(1, 3, 2, D) of `LowRankAdaLN`, for one time that all rows share"""


class TimestepConditioning(nn.Module):
    """t (B,) to the shift, scale and gate that all blocks share, (B, 3, D)."""

    def __init__(self, timestep_dim: int, dim: int):
        super().__init__()
        self.timestep_dim = timestep_dim
        self.layers = nn.Sequential(
            nn.Linear(timestep_dim, dim, bias=False),
            nn.SiLU(),
            nn.Linear(dim, dim, bias=False),
            nn.SiLU(),
            nn.Linear(dim, 3 * dim, bias=False),
        )

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        embedding = timestep_embedding(t, self.timestep_dim).to(dtype)
        return self.layers(embedding).unflatten(-1, (3, -1))


class LowRankAdaLN(nn.Module):
    """Each of shift, scale, gate of attention and MLP = up(down(silu(shared))) + shared.

    shared (B, 3, D) to (B, 3, 2, D): 3 is shift, scale, gate; 2 is attention, MLP. The rows of
    `down` and `up` are laid out in that order, so both products run as one batch each.
    """

    def __init__(self, dim: int, rank: int):
        super().__init__()
        self.rank = rank
        self.down = nn.Linear(dim, 6 * rank, bias=False)
        self.up = nn.Linear(rank, 6 * dim)

    def forward(self, shared: torch.Tensor) -> torch.Tensor:
        batch, _, dim = shared.shape
        low_rank = torch.bmm(  # (3, 2R, D) x (3, D, B)
            self.down.weight.to(shared.dtype).view(3, 2 * self.rank, dim),
            F.silu(shared).permute(1, 2, 0),
        )
        bias = self.up.bias.to(shared.dtype).view(3, 2, 1, dim)
        # Batch before channels: the kernels over (B, T, D) read the result along contiguous channels. The
        # other order, which needs no copy of the weight's gradient, makes them read a sector per number.
        up = torch.baddbmm(  # (6, B, D) + (6, B, R) x (6, R, D)
            (bias + shared.transpose(0, 1)[:, None]).flatten(0, 1),
            low_rank.view(6, self.rank, batch).mT,
            self.up.weight.to(shared.dtype).view(6, dim, self.rank).mT,
        )
        return up.view(3, 2, batch, dim).permute(2, 0, 1, 3)


class TransformerBlock(WithOperations):
    """x + tanh(gate)·attention(modulated norm of x), then the same with the MLP. (B, T, D)."""

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__()
        self.eps = args.norm_eps
        self.adaln = LowRankAdaLN(args.dim, args.adaln_rank)
        self.attention = JointAttention(
            args.dim, args.n_heads, args.text_key_dim, args.speaker_dim, args.norm_eps
        )
        self.mlp = GatedMLP(args.dim, args.mlp_dim, args.n_heads)

    def forward(
        self,
        x: torch.Tensor,
        shared: torch.Tensor | None,
        rope: torch.Tensor,
        keys: JointKeys,
        text: torch.Tensor,
        speaker: torch.Tensor,
        text_rope: torch.Tensor | None = None,
        cache: BlockCache | None = None,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        """text and speaker are encoded conditions. With a cache neither they nor `text_rope` and `shared` are
        used. `shared` has a row for each of the samples that are `packed` in the one of x."""
        if cache is None:
            assert shared is not None
            key_values = self.attention.condition_key_values(text, speaker, text_rope)
            modulation = self.adaln(shared)
        else:
            key_values, modulation = cache
        shift, scale, gate = modulation[..., None, :].unbind(1)  # each (B, 2, 1, D)
        gate = torch.tanh(gate)
        ops = self.operations(x)
        x, h = ops.gated_norm(x, None, None, scale[:, 0], shift[:, 0], self.eps, packed)
        attended = self.attention(h, rope, keys, key_values)
        given = attended, gate[:, 0], scale[:, 1], shift[:, 1]
        x, h = ops.gated_norm(x, *given, self.eps, packed)
        return ops.add_gated(x, gate[:, 1], self.mlp(h), packed)


class DiTTTSModel(ConditionedModel):
    """Diffusion transformer over audio latents with joint attention to text, speaker and caption.

    Unconditional branches are made by masking keys (`keep_text`, `keep_speaker`, `keep_caption`), so
    encoded conditions and their K and V stay the same for every branch and every sampling step.
    """

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__(args)
        self.timestep = TimestepConditioning(args.timestep_dim, args.dim)
        self.input = nn.Linear(args.latent_channels, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.latent_channels)
        # Tensor parallelism leaves the groups of this rank's heads.
        self.rotated = rotated_groups(args.n_heads)

    def _text_rope(self, conditions: Conditions, frames: torch.Tensor) -> torch.Tensor | None:
        """Rotary table of the text's keys, at position·T - 1/2 of utterances of T frames, (B, 1) or of each token (B, L): if
        all L tokens take the same time, token i is at (i + 1/2)·T/L - 1/2, the frame in its middle. After LARoPE (arXiv
        2509.11084), which scales both axes to a constant instead. Tokens that are not text are not rotated."""
        args = self.args
        if args.text_positions == "none":
            return None
        relative = conditions.text_positions
        if relative is None:
            raise ValueError('text_positions = "aligned" needs text_positions in the batch')
        positions = torch.where(relative < 0, 0.0, relative * frames - 0.5)
        head_dim = args.dim // args.n_heads
        return rope_table(positions, head_dim, args.rope_theta, self.rotated)

    def block_caches(
        self, conditions: Conditions, times: torch.Tensor, frames: torch.Tensor
    ) -> list[list[BlockCache]]:
        """Return each block's cache for each of the times (N,), for utterances of `frames` (B,)."""
        shared = self.timestep(times)
        text_rope = self._text_rope(conditions, frames[:, None])
        layers = [cast(TransformerBlock, layer) for layer in self.layers]
        key_values = [
            layer.attention.condition_key_values(conditions.text, conditions.speaker, text_rope)
            for layer in layers
        ]
        modulations = [layer.adaln(shared).split(1) for layer in layers]
        return [
            [BlockCache(*pair) for pair in zip(key_values, of_time, strict=True)]
            for of_time in zip(*modulations, strict=True)
        ]

    def denoise(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        frame_mask: torch.Tensor,
        conditions: Conditions,
        keep_text: torch.Tensor | None = None,
        keep_speaker: torch.Tensor | None = None,
        keep_caption: torch.Tensor | None = None,
        packed: PackedStreams | None = None,
    ) -> torch.Tensor:
        """The network's output for encoded conditions; see `ConditionedModel.forward` for the arguments."""
        x = self.input(latents.to(self.input.weight.dtype))
        kept = conditions.kept((keep_text, keep_speaker, keep_caption), packed)
        if packed is not None:
            rows = prepare_packed_keys(packed, (frame_mask, *kept))
            frames = packed.frames.starts.diff()[packed.text.segment]
            return self._decode(x, t, rows, conditions, frames[None], packed=packed.frames)
        # A row without any valid frame attends to all of its frames: no softmax is empty.
        self_mask = frame_mask | ~frame_mask.any(dim=1, keepdim=True)
        valid = torch.cat([self_mask, *kept], dim=1)
        keys = prepare_keys(self.args.attention, valid, latents.shape[1], x.dtype)
        frames = frame_mask.sum(dim=1, keepdim=True)
        return self._decode(x, t, keys, conditions, frames)

    def denoise_guided(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        keys: GuidedKeys,
        conditions: Conditions,
        frames: torch.Tensor,
        caches: list[BlockCache] | None = None,
    ) -> torch.Tensor:
        """The output for N copies of a batch with one time.

        Args:
            latents: (N·B, T, C), copy by copy.
            t: (1,).
            conditions: of B rows; `keys` tells which of them each copy has.
            frames: (B,) lengths of the utterances, whose first frames the latents are.
            caches: of `block_caches` at this time, one per block.
        """
        x = self.input(latents.to(self.input.weight.dtype))
        # A CPU computes every padded frame, and takes attention sample by sample at no cost; a compiled block would
        # have one graph for each list of lengths.
        compiled = cast(nn.Module, self.layers[0])._compiled_call_impl is not None
        if keys.lengths is None or compiled or not x.is_cpu:
            keys = keys._replace(lengths=None)
            return self._decode(x, t, keys, conditions, frames[:, None], caches)
        own = torch.tensor([row[0] for row in keys.lengths])
        valid = valid_mask(own, x.shape[1]).repeat(len(keys.copies), 1)
        positions = torch.arange(x.shape[1]).float().expand(valid.shape)[valid]
        rows = self._decode(
            x[valid][None], t, keys, conditions, frames[:, None], caches, positions=positions
        )
        output = rows.new_zeros(*x.shape[:2], rows.shape[-1])
        output[valid] = rows[0]
        return output

    def _decode(
        self,
        x: torch.Tensor,
        t: torch.Tensor,
        keys: JointKeys,
        conditions: Conditions,
        frames: torch.Tensor,
        caches: list[BlockCache] | None = None,
        packed: Stream | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        args = self.args
        if positions is None:
            positions = positions_of(x, packed)
        rope = rope_table(positions, args.dim // args.n_heads, args.rope_theta, self.rotated)
        text, speaker, shared, text_rope = conditions.text, conditions.speaker, None, None
        if caches is None:
            shared, text_rope = self.timestep(t), self._text_rope(conditions, frames)
        for index, layer in enumerate(self.layers):
            cache = caches[index] if caches is not None else None
            x = layer(x, shared, rope, keys, text, speaker, text_rope, cache, packed)
        return self.output(self.norm(x)).float()
