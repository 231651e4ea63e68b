"""Backends of the decoder's joint attention.

A batch's keys are [self ‖ text ‖ speaker], with a caption behind the speaker's. Each stream is padded on the right
and a condition may be dropped, so the valid keys have gaps. Queries are the frames; the output at padded frames is finite and never read.
`prepare_keys` converts the mask to the form that the kernel needs, once per step and without a host sync.

- sdpa: keys keep their positions, under an additive mask (B, 1, 1, K). Any device, any dtype.
- matmul: as sdpa, but by two matmuls and a softmax, whose (B, H, T, K) is kept for the backward pass.
- varlen: valid frames and keys are packed sample by sample, without a mask (flash attention).

A batch whose samples stand in one row (`streams.PackedStreams`) takes varlen.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from torchtitan.models.dit_tts.model.packed_attention import Packing, Streams, packed_attention
from torchtitan.models.dit_tts.streams import PackedStreams, Stream

BACKENDS = ("auto", "sdpa", "matmul", "varlen")
"""Values of [attention] backend"""

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=causal
    )
    return out.transpose(1, 2)


def _matmul(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if causal:
        assert mask is None
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        scores.add_(mask)
    # In place, if no gradient needs the scores.
    out = None if scores.requires_grad else scores
    return (torch.softmax(scores, -1, out=out) @ v).transpose(1, 2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """softmax(q kᵀ / √K) v for tensors (B, L, H, K), by matmuls if the backend resolves to them, else by SDPA.
    The mask, boolean or additive, broadcasts to (B, H, Lq, Lk); `causal` replaces one."""
    by_matmul = choose_backend(backend, q.device, q.dtype) == "matmul"
    return (_matmul if by_matmul else _sdpa)(q, k, v, mask, causal)


def _join_heads(streams: Streams) -> torch.Tensor:
    """Concatenates streams with each head's keys contiguous in memory, as matmuls read them."""
    return torch.cat([x.transpose(1, 2) for x in streams], dim=2).transpose(1, 2)


class MaskedKeys(NamedTuple):
    """Backends "sdpa" and "matmul"."""

    mask: torch.Tensor | None
    """(B, 1, 1, K), zero at valid keys and -inf elsewhere, in the dtype of the queries: SDPA would
    convert a boolean mask to this in every block. None: all are valid"""

    by_matmul: bool

    def attend(self, q: torch.Tensor, keys: Streams, values: Streams) -> torch.Tensor:
        if self.by_matmul:
            return _matmul(q, _join_heads(keys), _join_heads(values), self.mask)
        return _sdpa(q, torch.cat(keys, dim=1), torch.cat(values, dim=1), self.mask)


class VarlenKeys(NamedTuple):
    """Backend "varlen"."""

    frames: Packing
    keys: Packing
    kernel: Callable[..., torch.Tensor] | None = None
    """has the arguments of `packed_attention`; None: the device's default"""

    def attend(self, q: torch.Tensor, keys: Streams, values: Streams) -> torch.Tensor:
        kernel = self.kernel or _varlen_kernel(q)
        rows = kernel(
            self.frames.pack(q),
            self.keys.pack(*keys),
            self.keys.pack(*values),
            self.frames.starts,
            self.keys.starts,
            self.frames.longest,
            self.keys.longest,
        )
        return self.frames.unpack(rows)


def attend_within(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stream: Stream, causal: bool
) -> torch.Tensor:
    """`attend` of the samples of a stream, (1, L, H, K), each to itself; zero in padding."""
    valid = (torch.arange(q.shape[1], device=q.device) < stream.starts[-1])[None]
    packing = Packing(None, valid, stream.starts, stream.longest)
    packed = (packing.pack(x) for x in (q, k, v))
    sizes = stream.starts, stream.starts, stream.longest, stream.longest
    window = (-1, 0 if causal else -1)
    return packing.unpack(_varlen_kernel(q)(*packed, *sizes, window_size=window))


def _varlen_kernel(q: torch.Tensor) -> Callable[..., torch.Tensor]:
    if not (q.is_cuda and q.dtype in _FLASH_DTYPES):
        return packed_attention
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, a second of a start

    # varlen_attn returns one tensor unless it is asked for auxiliary outputs.
    return cast(Callable[..., torch.Tensor], varlen_attn)


class GuidedKeys(NamedTuple):
    """Keys of guided sampling: N copies of a batch of B rows, each with or without text, speaker and caption. A copy attends to
    the keys that it has; all copies share the B rows of the conditions."""

    copies: tuple[tuple[bool, ...], ...]
    """whether each copy has (text, speaker, caption)"""

    masks: tuple[torch.Tensor | None, ...]
    """as `MaskedKeys.mask`, over the keys of each copy; None: all are valid"""

    speaker_scale: float | None = None
    """factor of the speaker's keys and values; None: 1"""

    lengths: tuple[tuple[int, ...], ...] | None = None
    """valid frames, text tokens, patches and tokens of the caption of each of the B rows; then the queries, and their
    own keys and values, are (1, N·frames, H, K), the rows of each copy one behind the other without padding. None: they are padded"""

    patches: int | None = None
    """of the reference among the speaker's keys, behind which those of the caption stand; None: there are none"""

    def attend(self, q: torch.Tensor, keys: Streams, values: Streams) -> torch.Tensor:
        if self.patches is not None:
            keys, values = (
                (*streams[:2], streams[2][:, : self.patches], streams[2][:, self.patches :])
                for streams in (keys, values)
            )
        if self.speaker_scale is not None:
            keys = (*keys[:2], keys[2] * self.speaker_scale, *keys[3:])
            values = (*values[:2], values[2] * self.speaker_scale, *values[3:])
        if self.lengths is not None:
            return self._attend_packed(q, keys, values, self.lengths)
        attended = []
        # With chunk() a compiler would take every number of rows as another shape.
        of_copies = (x.unflatten(0, (len(self.copies), -1)) for x in (q, keys[0], values[0]))
        queries, own_keys, own_values = (x.unbind() for x in of_copies)
        for copy, (has, mask) in enumerate(zip(self.copies, self.masks, strict=True)):
            k = [own_keys[copy], *itertools.compress(keys[1:], has)]
            v = [own_values[copy], *itertools.compress(values[1:], has)]
            attended.append(attend(queries[copy], _join_heads(k), _join_heads(v), mask))
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    def _attend_packed(
        self, q: torch.Tensor, keys: Streams, values: Streams, lengths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        sizes = [frames for frames, *_ in lengths] * len(self.copies)
        own = zip(*(x.split(sizes, dim=1) for x in (q, keys[0], values[0])))
        attended = []
        for has, (row, (_, *valid)) in itertools.product(self.copies, enumerate(lengths)):
            query, *joined = next(own)
            for index, streams in enumerate((keys, values)):
                kept = itertools.compress(zip(streams[1:], valid), has)
                conditions = [stream[row : row + 1, :size] for stream, size in kept]
                joined[index] = _join_heads([joined[index], *conditions])
            attended.append(attend(query, *joined))
        return torch.cat(attended, dim=1)


JointKeys = MaskedKeys | VarlenKeys | GuidedKeys
"""The batch's keys as a backend needs them. `attend(q, keys, values)` computes the attention of
q (B, T, H, K) over the keys and values of the streams, (B, T, H, K)."""


def _packing(valid: torch.Tensor) -> Packing:
    flat = valid.flatten()
    position = torch.where(flat, flat.cumsum(0) - 1, flat.sum() + (~flat).cumsum(0) - 1)
    starts = F.pad(valid.sum(dim=1).cumsum(0), (1, 0))
    return Packing(position.view_as(valid), valid, starts.int(), valid.shape[1])


def prepare_packed_keys(packed: PackedStreams, masks: Sequence[torch.Tensor]) -> JointKeys:
    """`prepare_keys` of a packed batch; masks (1, N), (1, L), (1, P) and, with captions, (1, S·C) of its streams' valid
    keys."""
    samples = packed.frames.samples
    streams = [stream for stream in packed if stream is not None]
    segment = torch.cat(  # those of no sample come last
        [
            torch.where(mask[0], stream.segment[: mask.shape[1]], samples)
            for stream, mask in zip(streams, masks)
        ]
    )
    position = torch.empty_like(segment)
    position[segment.argsort(stable=True)] = torch.arange(len(segment), device=segment.device)
    own = torch.arange(samples, device=segment.device)[:, None] == segment
    starts = F.pad(own.sum(dim=1).cumsum(0), (1, 0)).int()
    longest = sum(stream.longest for stream in streams)
    frames = packed.frames
    return VarlenKeys(
        Packing(None, masks[0], frames.starts, frames.longest),
        Packing(position[None], (segment < samples)[None], starts, longest),
    )


def _additive(valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, K) to (B, 1, 1, K), zero at valid keys and -inf elsewhere."""
    return torch.zeros_like(valid, dtype=dtype).masked_fill(~valid, float("-inf"))[:, None, None]


def guided_keys(
    streams: Sequence[torch.Tensor],
    copies: Sequence[tuple[bool, ...]],
    dtype: torch.dtype,
    speaker_scale: float = 1.0,
) -> GuidedKeys:
    """Keys of a sampler, from the masks (B, T), (B, L), (B, P) and, with captions, (B, C) of one copy, whose valid keys
    come first in each row. Waits for the device; to be called once for all steps of the same copies and scale."""
    masks: list[torch.Tensor | None] = []
    for copy in copies:
        chosen = [streams[0], *itertools.compress(streams[1:], copy)]
        valid = torch.cat(chosen, dim=1)
        masks.append(None if valid.all() else _additive(valid, dtype))
    scale = None if speaker_scale == 1.0 else speaker_scale
    lengths: tuple[tuple[int, ...], ...] | None = None
    if any(mask is not None for mask in masks):
        assert all((mask[:, 1:] <= mask[:, :-1]).all() for mask in streams), "a gap in the keys"
        lengths = tuple(zip(*(mask.sum(1).tolist() for mask in streams)))
    patches = streams[2].shape[1] if len(streams) > 3 else None
    return GuidedKeys(tuple(copies), tuple(masks), scale, lengths, patches)


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolves "auto", and replaces varlen by sdpa where flash attention does not take the dtype."""
    if backend == "auto":
        # On a CPU SDPA converts bfloat16 in each block of its kernel; on an H200 cuDNN's was the fastest (docs/speed.md).
        by_matmul = device.type == "cpu" and dtype == torch.bfloat16
        backend = "matmul" if by_matmul else "sdpa"
    if backend == "varlen" and device.type == "cuda" and dtype not in _FLASH_DTYPES:
        return "sdpa"
    return backend


def prepare_keys(backend: str, valid: torch.Tensor, frames: int, dtype: torch.dtype) -> JointKeys:
    """A batch's keys in the form that the backend needs.

    Args:
        backend: one of BACKENDS.
        valid: (B, K) bool, true at valid keys; at least one in each row. The first T are the frames,
            and those valid as keys are valid as queries.
        frames: T.
        dtype: of queries, keys and values.
    """
    backend = choose_backend(backend, valid.device, dtype)
    if backend == "varlen":
        return VarlenKeys(frames=_packing(valid[:, :frames]), keys=_packing(valid))
    if backend not in ("sdpa", "matmul"):
        raise ValueError(f"attention backend {backend!r} is not one of {', '.join(BACKENDS)}")
    return MaskedKeys(_additive(valid, dtype), by_matmul=backend == "matmul")
