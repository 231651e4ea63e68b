"""Packed rows: every token once, each text by itself, hardly any padding."""

import numpy as np
import torch

from torchtitan.models.dit_tts.text.packing import pack_rows


def mask_of(lengths, first=0):
    position = np.arange(first + max(lengths))
    return (position >= first) & (position < first + np.array(lengths)[:, None])


def test_packed_rows_hold_each_token_once_and_hardly_any_padding():
    lengths = np.random.default_rng(0).integers(10, 60, size=64)
    rows = pack_rows(mask_of(lengths, first=3))
    kept = rows.segment > 0
    assert kept.float().mean() > 0.95
    tokens = rows.token[kept]
    assert len(set(tokens.tolist())) == len(tokens) == lengths.sum()
    # There and back again: the index that a token came from finds it.
    valid = torch.from_numpy(mask_of(lengths, first=3))
    assert torch.equal(rows.token.flatten()[rows.origin[valid]], valid.flatten().nonzero().T[0])
    assert (rows.origin[~valid] == rows.token.numel()).all()


def test_texts_that_stand_in_one_row():
    """One token of conditioning before a text of 2 tokens, before none, and before 3; two places are empty."""
    valid = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 0, 0]], bool)
    rows = pack_rows(valid, samples=np.array([3, 1, 4, 0, 0]))
    assert rows.token[rows.segment > 0].tolist() == [5, 6, 7, 1, 2]
    assert rows.segment[0, :5].tolist() == [1, 1, 1, 2, 2]
    assert rows.position[0, :5].tolist() == [0, 1, 2, 0, 1]
    blocks = torch.block_diag(*(torch.ones(3, 3), torch.ones(2, 2))).bool()
    assert torch.equal(rows.same_segment[0, 0, :5, :5], blocks)
    last = rows.token.numel()
    assert rows.origin.tolist() == [[last, 3, 4, last, last, 0, 1, 2, last, last]]


def test_texts_may_have_gaps():
    """The encoder reads what is text, each with its own position; an added token in the middle is none of it."""
    valid = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]], bool)
    rows = pack_rows(valid)
    assert sorted(rows.token[rows.segment > 0].tolist()) == np.flatnonzero(valid).tolist()
    for where, start in ((1, 0), (2, 1), (4, 2), (11, 0), (13, 1)):
        at = int(rows.origin.reshape(-1)[where])
        assert rows.token.reshape(-1)[at] == where and rows.position.reshape(-1)[at] == start


def test_unpacked_rows_have_one_text_each():
    rows = pack_rows(mask_of([2, 5, 0, 3]), packed=False)
    assert rows.shape == (4, 5) and rows.segment.sum(1).tolist() == [5, 3, 2, 0]
    assert rows.origin[:, 0].tolist() == [10, 0, 20, 5]


def test_a_compiled_encoder_gets_few_shapes_with_the_same_texts():
    """Rows of 520 tokens, 5 times the longest text; 1, 2, 3, 4, 6, 8, 12 of them."""
    shapes, generator = set(), np.random.default_rng(1)
    for batch in (1, 3, 9, 17, 33, 60):
        valid = mask_of(generator.integers(0, 100, size=batch))
        rows = pack_rows(valid, longest=100)
        shapes.add(rows.shape)
        flat, real = torch.from_numpy(valid).flatten(), (rows.segment > 0).flatten()
        assert sorted(rows.token.flatten()[real].tolist()) == flat.nonzero().flatten().tolist()
        found = rows.token.flatten()[rows.origin.flatten()[flat]]
        assert torch.equal(found, flat.nonzero().flatten())
        assert (rows.origin.flatten()[~flat] == rows.token.numel()).all()
    assert {width for _, width in shapes} == {520}
    assert len(shapes) > 3 and {count for count, _ in shapes} <= {1, 2, 3, 4, 6, 8}
    assert pack_rows(mask_of([101]), longest=96).shape == (1, 101)
    assert pack_rows(mask_of([5, 9]), False, longest=20).shape == (2, 24)
