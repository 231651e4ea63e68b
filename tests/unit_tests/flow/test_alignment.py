"""The loss of the alignment head against its definition, row by row."""

import itertools
import math

import pytest
import torch

from torchtitan.models.dit_tts.flow.alignment import ctc_sums

CLASSES = 257


def spoken(path: tuple[int, ...]) -> bytes:
    """The text of a class per frame: repeats become one, then blanks go."""
    return bytes(each - 1 for each, _ in itertools.groupby(path) if each)


def by_definition(logits: torch.Tensor, text: bytes) -> float:
    """-log of the sum over all paths that speak the text; logits (T, 257)."""
    log_probs = logits.double().log_softmax(-1)
    classes = [0, *(1 + byte for byte in set(text))]
    total = sum(
        math.exp(sum(float(log_probs[frame, each]) for frame, each in enumerate(path)))
        for path in itertools.product(classes, repeat=len(logits))
        if spoken(path) == text
    )
    return -math.log(total) if total else math.inf


def sums(logits, frames, texts, counted=None):
    width = max(map(len, texts), default=0) + 2
    padded = torch.tensor([[*text, *[7] * (width - len(text))] for text in texts])
    counted = torch.tensor([True] * len(texts) if counted is None else counted)
    return ctc_sums(logits, frames, padded.to(torch.uint8), [len(t) for t in texts], counted)


def test_against_the_sum_over_all_paths():
    torch.manual_seed(0)
    logits = torch.randn(5, 6, CLASSES)
    frames, texts = [6, 4, 5, 3, 2], [b"ab", b"\xff\x00", b"aa", b"", b"x"]
    found = sums(logits, frames, texts)
    for row, (length, text) in enumerate(zip(frames, texts)):
        wanted = by_definition(logits[row, :length], text)
        assert float(found[row]) == pytest.approx(wanted, rel=1e-5)
    # In float32 also of other logits; neither padding nor other rows matter.
    logits = logits.bfloat16()
    together = sums(logits, frames, texts)
    assert torch.equal(together, sums(logits.float(), frames, texts))
    logits[1, 4:] = 9.0
    assert torch.equal(sums(logits, frames, texts), together)
    for row, (length, text) in enumerate(zip(frames, texts)):
        [alone] = sums(logits[row : row + 1, :length], [length], [text])
        assert torch.equal(alone, together[row])


def test_rows_that_do_not_fit_or_do_not_count_are_zero_with_their_gradient():
    logits = torch.randn(4, 3, CLASSES, requires_grad=True)
    texts = [b"abcd", b"aab", b"ab", b"ab"]
    found = sums(logits, [3] * 4, texts, [True, True, False, True])
    assert found.tolist()[:3] == [0, 0, 0] and 0 < found[3] < math.inf
    found.sum().backward()
    assert not logits.grad[:3].any() and logits.grad[3].isfinite().all() and logits.grad[3].any()
