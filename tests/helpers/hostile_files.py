"""Files that no careful program would write: tiny builders of one each.

What stands under a name is bytes, a text, a folder as a dictionary, or a function of the path.
"""

import gzip
import io
import json
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tars import npy

CHANNELS = 8
ESCAPE = "\x1b]0;title\x07\x1b[31m"
"""what a terminal would obey"""


def put(path: Path, content: Any) -> None:
    """Makes what is to stand at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        path.mkdir(exist_ok=True)
        for name, each in content.items():
            put(path / name, each)
    elif callable(content):
        content(path)
    else:
        if path.is_file():
            path.unlink()
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(target: str):
    """A symbolic link: dangling, to a device, or to itself."""
    return lambda path: path.symlink_to(target)


def sparse(size: int):
    """So many bytes that take no disk."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


def wav(
    rate=16000, channels=1, bits=16, tag=1, samples=8000, data: bytes | None = None, lie: int = 0
) -> bytes:
    """A tone of half a second; `lie` is added to both sizes in its header."""
    if data is None:
        tone = np.sin(np.arange(samples) / 9).repeat(channels or 1) * (0.5 * 2 ** (bits - 1))
        data = (tone + 128 * (bits == 8)).astype({8: "u1", 16: "<i2", 32: "<i4"}[bits]).tobytes()
    block = max(1, channels * bits // 8)
    fields = (tag, channels, rate % 2**32, rate * block % 2**32, block % 2**16, bits)
    form = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, *fields)
    form += b"data" + struct.pack("<I", len(data) + lie) + data
    return b"RIFF" + struct.pack("<I", len(form) + lie) + form


def float_wav(value: float) -> bytes:
    return wav(bits=32, tag=3, data=np.full(8000, value, "<f4").tobytes())


def latents(rows=16, width=CHANNELS) -> bytes:
    return npy(np.full((rows, width), 0.5, "<f2"))


def npy_header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode() + data


def sample(key="bad", array=None, reference=None, text: Any = "one two") -> list:
    """The members of a sample; `text` as bytes is the JSON itself."""
    metadata = text if isinstance(text, bytes) else json.dumps({"text": text}).encode()
    arrays = (latents() if array is None else array, latents(4) if reference is None else reference)
    members = zip(("npy", "ref.npy", "json"), (*arrays, metadata))
    return [(f"{key}.{suffix}", data) for suffix, data in members]


def tar(*groups) -> bytes:
    """A tar of groups of (name, bytes) or of `tarfile.TarInfo`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in (member for group in groups for member in group):
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if data is not None:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data or b""))
    return buffer.getvalue()


GOOD = [sample(f"good{number}", text="one two three") for number in range(20)]


def shard(*bad) -> bytes:
    """Twenty good samples, then others."""
    return tar(*GOOD, *bad)


def special(name: str, kind: bytes, target: str = "") -> list:
    """A member without data: a link, a device, a folder."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return [(info, None)]


def resized(data: bytes, size: int) -> bytes:
    """The tar with another size in its first header, whose checksum fits."""
    info = tarfile.TarInfo.frombuf(data[:512], "utf-8", "strict")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + data[512:]


def gz(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def manifest(*rows: Any) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def recordings(bad: Any, name="bad.wav", **columns: Any) -> dict[str, Any]:
    """A manifest of one good recording and a bad one."""
    row = {"audio": name, "text": "three", "speaker": "ann", **columns}
    good = {"audio": "good.wav", "text": "one two", "speaker": "ann"}
    there = {} if bad is None else {name: bad}
    return {"manifest.jsonl": manifest(good, row), "good.wav": wav(), **there}
