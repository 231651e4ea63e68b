"""Long audio through convolutions in portions, with the same result as in one piece.

An output frame of a stack of convolutions depends on a bounded part of its input, its context. A
portion is computed from its frames and their context, and the outputs of the context are dropped: at
a cut the layers pad with zeros where there is audio, and those zeros reach only what is dropped. At
the audio's own ends the portion ends too, and is padded as it would be in one piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Context:
    """Frames before and after its own on which a portion's output depends."""

    before: int
    after: int


@dataclass(frozen=True)
class Portion:
    """A part of a batch that goes through the network at once."""

    rows: slice
    given: slice  # frames of the input: its own and their context
    frames: slice  # its own frames
    kept: slice  # its own frames, counted from the start of `given`


def encoder_context(encoder: nn.Module, hop_length: int) -> Context:
    """The context of layers from samples to frames, rounded outwards to frames."""
    first, last = _needed(encoder, 0, 0)
    return Context(-(first // hop_length), last // hop_length)


def decoder_context(decoder: nn.Module, hop_length: int) -> Context:
    """The context of layers from frames to samples."""
    first, last = _needed(decoder, 0, hop_length - 1)
    return Context(-first, last)


def _needed(network: nn.Module, first: int, last: int) -> tuple[int, int]:
    """(first, last) position of the input that the positions first..last of the output depend on.

    The convolutions' order in the module is that of their execution. The skip connections of the
    residual units add the position itself, on which a convolution depends too.
    """
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv1d | nn.ConvTranspose1d)]
    for layer in reversed(convolutions):
        stride, padding = layer.stride[0], layer.padding[0]
        assert isinstance(padding, int)
        reach = (layer.kernel_size[0] - 1) * layer.dilation[0]
        if isinstance(layer, nn.ConvTranspose1d):
            # Output o has input i where o = i * stride - padding + j for a j in 0..reach.
            first, last = -((reach - padding - first) // stride), (last + padding) // stride
        else:
            first, last = first * stride - padding, last * stride - padding + reach
    return first, last


def portions(rows: int, frames: int, frames_at_once: int, context: Context) -> Iterator[Portion]:
    """Cut (rows, frames) into portions of at most about `frames_at_once`, over all of their rows.

    Rows go together as long as they fit; a longer row is cut into equal parts.
    """
    if frames <= frames_at_once:
        step, parts = frames_at_once // frames, 1
    else:
        step, parts = 1, -(-frames // frames_at_once)
    for row in range(0, rows, step):
        for part in range(parts):
            first, last = frames * part // parts, frames * (part + 1) // parts
            start, stop = max(0, first - context.before), min(frames, last + context.after)
            yield Portion(
                slice(row, min(row + step, rows)),
                slice(start, stop),
                slice(first, last),
                slice(first - start, last - start),
            )
