"""One run read by several conventions of counting FLOPs, so that no MFU stands without its own.

T, Lt, Ls are a sample's latent frames, text tokens and speaker keys (reference frames after patching),
N the trained parameters, L the decoder's blocks, D its width. The 6N rules are those of language
models (Kaplan et al. 2020; Chowdhery et al. 2022): all parameters work on every position. Here the
speaker encoder and the text's and speaker's projections work on other, fewer positions, and AdaLN
once a sample.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths, text_encoder_flops, training_flops

_LEFT_OUT = {
    "varlen": "padded keys and frames",
    "flex": "blocks of 128 keys in which none counts",
}
"""What of the padded shapes a backend of attention does not compute"""


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of one rank's micro-batch."""

    shape: tuple[int, int, int, int]
    """padded (samples, frames, text tokens, speaker frames)"""

    lengths: Sequence[tuple[int, int, int]]
    """real frames, text tokens and speaker frames of each sample"""

    text_rows: Sequence[tuple[int, int]] = ()
    """(rows, tokens) of each pass through a pretrained text encoder"""


@dataclass(frozen=True)
class Convention:
    name: str
    counts: str
    """what it counts, in words"""

    flops: int
    """of one micro-batch, or of many together"""


def conventions(
    args: DiTTTSModelArgs, parameters: int, batches: Iterable[MicroBatch]
) -> list[Convention]:
    """FLOPs of these micro-batches together by each convention; the first is the one of `mfu`."""
    executed = useful = encoder = encoder_useful = frames_only = all_keys = 0
    sizes = args.text_encoder_sizes
    for batch in batches:
        samples, T, Lt, reference = batch.shape
        executed += samples * training_flops(args, Lengths(T, Lt, reference))
        useful += sum(training_flops(args, Lengths(*lengths)) for lengths in batch.lengths)
        if sizes is not None:
            encoder += sum(text_encoder_flops(sizes, *rows) for rows in batch.text_rows)
            encoder_useful += sum(
                text_encoder_flops(sizes, 1, lengths[1]) for lengths in batch.lengths
            )
        Ls = -(-reference // args.speaker_patch_size)
        frames_only += samples * _language_model(args, parameters, T)
        all_keys += samples * _language_model(args, parameters, T + Lt + Ls)
    with_encoder = ", with the text encoder" if sizes is not None else ""
    return [
        Convention(
            "exact", f"padded shapes, as PyTorch's counter{with_encoder}", executed + encoder
        ),
        Convention("exact goodput", f"real lengths only{with_encoder}", useful + encoder_useful),
        Convention("6N T", "6·N·T + 12·L·D·T² over all parameters, padded shapes", frames_only),
        Convention(
            "6N (T+Lt+Ls)",
            "6·N·S + 12·L·D·S² over all parameters with S = T + Lt + Ls, padded shapes",
            all_keys,
        ),
    ]


def attention_note(backend: str) -> str:
    """What the figures mean under the attention backend that ran."""
    left_out = _LEFT_OUT.get(backend)
    if left_out is None:
        return f"attention {backend}: the padded shapes are what was executed"
    return (
        f"attention {backend}: leaves {left_out} out, so less was executed than the padded shapes that "
        f"mfu counts"
    )


def _language_model(args: DiTTTSModelArgs, parameters: int, length: int) -> int:
    return 6 * parameters * length + 12 * args.n_layers * args.dim * length**2


def table(
    counted: Sequence[Convention], seconds: float, devices: int, peak: float | None
) -> list[dict[str, Any]]:
    """Each convention with its TFLOP/s a device, its MFU (None without a known peak, in FLOP/s) and
    how many times the exact figure it is."""
    rows = []
    for each in counted:
        rate = each.flops / seconds / devices
        rows.append(
            {
                "convention": each.name,
                "counts": each.counts,
                "flops": each.flops,
                "tflops_per_device": rate / 1e12,
                "mfu": peak and rate / peak,
                "times_exact": each.flops / counted[0].flops,
            }
        )
    return rows
