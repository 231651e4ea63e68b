"""The one door for files of others: what is out of bounds is a ValueError, within seconds and little memory."""

import json
import math
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.lib import format as npy_format
from safetensors.torch import save_file

from tests.helpers.hostile_files import fifo, link, npy_header, put, sparse
from tests.helpers.sentences import refused
from tests.helpers.tars import npy
from titan_tts.speak.speech_data import ExportedSpeechData
from torchtitan.models.dit_tts import bounded
from torchtitan.models.dit_tts.config.exported import VOICES
from torchtitan.models.dit_tts.errors import reading


def npz(**members: bytes):
    def make(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            for name, data in members.items():
                file.writestr(f"{name}.npy", data)

    return make


def saved(content):
    return lambda path: torch.save(content, path)


def tensors(**values):
    return lambda path: save_file(values, path)


NO_FILES = {"a FIFO": fifo, "a device": link("/dev/zero"), "too large": sparse(1 << 40)}
READERS = {
    bounded.read_json_file: {
        "deep": "[" * 10**5,
        "somewhat deep": '{"a": [' * 40 + "]}" * 40,
        "a long number": "9" * 101,
        "a longer number": "9" * 5000,
        "half a pair": '"\\ud83d"',
        "latin-1": '"ä"'.encode("latin-1"),
        "nothing": "",
    },
    bounded.read_toml: {"deep": "a = " + "[" * 10**5, "somewhat deep": f"a = {'[' * 99}{']' * 99}"},
    bounded.read_arrays: {
        "no zip": b"PK",
        "a bomb": npz(**{f"a{number}": bytes(64 << 20) for number in range(5)}),
        "a claim": npz(a=npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (9, 2**40)}")),
        "objects": npz(a=npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"N.")),
        "more bytes": npz(a=npy(np.zeros(3)) + b"0"),
    },
    bounded.read_weights: {
        "integers": tensors(a=torch.ones(2), b=torch.ones(2, dtype=torch.long)),
        "NaN": tensors(a=torch.ones(2), b=torch.tensor([1, math.nan])),
        "a header of 2^63 bytes": b"\xff" * 8 + b"{}",
    },
    bounded.read_pickle: {"code": saved(print), "cut": b"PK\x03\x04", "nothing": ""},
}  # fmt: skip
CASES = [
    (read, name, put) for read, more in READERS.items() for name, put in (NO_FILES | more).items()
]


@pytest.mark.parametrize(
    "read, name, content", CASES, ids=lambda each: getattr(each, "__name__", each)
)
def test_what_is_out_of_bounds(tmp_path, read, name, content):
    put(tmp_path / "file", content)

    def call():
        with reading(tmp_path / "file"):
            read(tmp_path / "file")

    refused(call, "file cannot be read (")


def test_what_is_within_bounds(tmp_path):
    path = tmp_path / "file"
    value = {"a": [1, 2.5, "\U0001f600", None], "b": 10**99}
    put(path, json.dumps(value))
    assert bounded.read_json_file(path) == value == bounded.read_json(path, a=list)
    assert bounded.read_json(path, a=dict) == {} == bounded.read_json(tmp_path / "none")
    put(
        path,
        npz(
            a=npy(np.asfortranarray(np.arange(6.0).reshape(2, 3))),
            b=npy(np.zeros((0, 2))),
            c=npy("x"),
        ),
    )
    found = bounded.read_arrays(path)
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"].shape == (0, 2)
    assert str(found["c"]) == "x"
    wanted = {
        "a": torch.full((3, 2), 6e4, dtype=torch.float16),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    put(path, tensors(**wanted))
    assert torch.equal(bounded.read_weights(path)[0]["a"], wanted["a"])
    put(path, saved({"a": [torch.ones(2)]}))
    assert torch.equal(bounded.read_pickle(path)["a"][0], torch.ones(2))


def test_headers_are_read_one_at_a_time(monkeypatch):
    """Python 3.11 counts the nesting of a literal for all threads together: good headers were refused."""
    inside, together, read = [], [], npy_format.read_array_header_1_0

    def slow(file):
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return read(file)

    monkeypatch.setattr(npy_format, "read_array_header_1_0", slow)
    arrays = [npy(np.full(n, n)) for n in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        found = [array.tolist() for array in pool.map(bounded.parse_array, arrays)]
    assert found == [[n] * n for n in range(1, 9)] and together == [1] * 8


@pytest.mark.parametrize("change", [
    lambda v: v.to_sparse(), lambda v: v.to("meta"), lambda v: v[:1].expand(9, 2), lambda v: v.long(), lambda v: v / 0,
])  # fmt: skip
def test_tensors_that_are_no_plain_weights(change):
    with pytest.raises(ValueError, match="^b "):
        bounded.as_weights({"a": torch.ones(3, 2), "b": change(torch.ones(3, 2))})


@pytest.mark.parametrize("shape", [(3,), (0, 8), (4, 7), (1, 4, 8), ()])
def test_an_exported_voice_of_another_shape_is_named(tmp_path, shape):
    (tmp_path / VOICES).parent.mkdir()
    save_file({"ann": torch.ones(4, 8), "bob": torch.ones(shape)}, tmp_path / VOICES)
    refused(lambda: ExportedSpeechData(tmp_path, 8).reference("ann"), "the voice bob is of shape")
