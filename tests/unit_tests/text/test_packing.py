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
