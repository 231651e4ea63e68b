"""`benchmarks/codec.py --recordings`: the texts that it reads, and its error of the pitch."""

import gzip

import numpy as np
import pytest

from benchmarks.codec import choose, pitch_errors, read_texts
from tests.helpers.sentences import refused


def test_the_recordings_with_the_longest_texts(tmp_path):
    texts = tmp_path / "texts.gz"
    lines = ["; a remark: no text", "a: One two.", "sub/b: At ten: go on, then.", "c: [beep] no"]
    lines += [f"d: {'word ' * 25}", "e: Three words here.", "gone: Nobody has recorded this one."]
    with gzip.open(texts, "wt") as file:
        file.write("\n".join(lines) + "\n")
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b", "c", "d", "e"):
        (tmp_path / f"{name}.g722").write_bytes(b"")
    found = read_texts(texts)
    assert found["sub/b"] == "At ten: go on, then." and "c" not in found
    chosen = choose(tmp_path, found, 2)  # of at most 24 words
    assert dict(chosen) == {
        tmp_path / "sub/b.g722": "At ten: go on, then.",
        tmp_path / "e.g722": "Three words here.",
    }
    refused(lambda: choose(tmp_path / "sub", found, 2), "none of the recordings")


def test_errors_of_the_pitch():
    pitch, voiced = np.full(8, 200.0), np.array([1, 1, 1, 1, 1, 0, 0, 0], bool)
    other = np.array([200, 200, 200 * 2 ** (10 / 1200), 202, 400, 90, 90, 90.0, 90])
    heard = np.array([1, 1, 1, 1, 1, 1, 0, 0, 1], bool)  # one frame longer than the other
    found = pitch_errors((pitch, voiced), (other, heard))
    assert found["pitch_cents"] == pytest.approx(10) and found["pitch_far_off"] == 20
    assert found["voicing_wrong"] == 12.5
    silent = pitch_errors((pitch, ~voiced), (other[:5], heard[:5]))
    assert np.isnan(silent["pitch_cents"]) and silent["voicing_wrong"] == 100
