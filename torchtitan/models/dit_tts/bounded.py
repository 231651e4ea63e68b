"""The one door for files that another person can hand over: size, depth, types and shapes are bounded, and nothing in
them is run.

What is out of bounds is a ValueError (as are errors of decoding) without the file's name, which `errors.reading` adds.
Libraries that open a path themselves come after `check_regular`: they would wait for ever at a FIFO.
"""

import io
import json
import math
import os
import pickle
import re
import stat
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # they take long to import
    import numpy as np
    from torch import Tensor

MAX_BYTES = 256 << 20
"""of a file that is read as a whole, and of an array"""

MAX_LINE = 16 << 20
"""of a file of lines"""

_MAX_DEPTH = 64
_MAX_DIGITS = 100  # less than a float's range, so that every integer can become one
_MAX_MEMBERS = 4096
_WEIGHTS = {"F64", "F32", "F16", "BF16"}
# Python 3.11 counts the nesting of literals for all threads together, and fails where two are at work.
_LITERALS = threading.Lock()
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def check_regular(path: str | os.PathLike, most: int | None = None) -> None:
    """Raises ValueError for a FIFO or a device, which may have no end, and for more than so many bytes."""
    _check(os.stat(path), most)


def _check(found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if most is not None and found.st_size > most:
        raise ValueError(f"{found.st_size} bytes, of at most {most}")


def read_bytes(path: str | os.PathLike, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file."""
    # A FIFO would hold up an ordinary open for ever.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        _check(os.fstat(file.fileno()), most)
        return file.read(most)


def lines(file: IO[str]) -> Iterator[str]:
    """The lines of an open file."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE} characters")
        yield line


def parse_json(text: str | bytes, half_pairs: bool = False) -> Any:
    """A JSON value; without halves of surrogate pairs, which no UTF-8 can hold, unless these are allowed."""
    text = text if isinstance(text, str) else str(text, "utf-8-sig")
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        _check_depth(value)
    if not half_pairs and _HALF_OF_A_PAIR.search(text) and not _has_utf8(value):
        raise ValueError("half of a surrogate pair, which utf-8 cannot encode")
    return value


def _has_utf8(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [
        below
        for each in level
        for below in (each.values() if isinstance(each, dict) else each)
        if isinstance(below, (dict, list))
    ]:
        depth += 1
        if depth >= _MAX_DEPTH:
            raise ValueError("nested too deeply")


def read_json_file(path: str | os.PathLike) -> Any:
    """The JSON value of a file."""
    return parse_json(read_bytes(path))


def read_json(path: Path, **kinds: type) -> dict[str, Any]:
    """A JSON object with values of these kinds; empty if the file is missing, incomplete or of another kind."""
    try:
        found = read_json_file(path)
    except (OSError, ValueError):
        return {}
    known = isinstance(found, dict) and all(isinstance(found.get(k), kinds[k]) for k in kinds)
    return found if known else {}


def read_toml(path: str | os.PathLike) -> dict[str, Any]:
    """The table of a TOML file."""
    try:
        found = tomllib.loads(str(read_bytes(path), "utf-8"))
        _check_depth(found)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return found


def npy_header(head: bytes) -> tuple[tuple[int, ...], bool, "np.dtype", int]:
    """(shape, whether in Fortran's order, dtype, where the values begin) of an npy file's first bytes."""
    from numpy.lib import format as npy

    file = io.BytesIO(head)
    try:  # numpy evaluates the text as a literal, which may fail in any way
        is_first = npy.read_magic(file) == (1, 0)
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        with _LITERALS:
            shape, is_fortran, dtype = read(file)
    except Exception as error:
        raise ValueError(f"not an npy array ({str(error)[:60]!r})") from None
    return shape, is_fortran, dtype, file.tell()


def parse_array(data: bytes) -> "np.ndarray":
    """The array of an npy file's bytes, of plain values."""
    import numpy as np

    shape, is_fortran, dtype, start = npy_header(data)
    if dtype.hasobject or dtype.fields or dtype.subdtype:
        raise ValueError(f"an array of {dtype}, not of plain values")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"{len(data) - start} bytes of values for the shape {shape}")
    if not math.prod(shape) or not dtype.itemsize:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if is_fortran else "C")


def read_arrays(path: str | os.PathLike) -> dict[str, "np.ndarray"]:
    """The arrays of an npz file by name. Their checksums are compared."""
    check_regular(path, MAX_BYTES)
    with zipfile.ZipFile(path) as file:
        _check_members(file, MAX_BYTES)
        return {name.removesuffix(".npy"): parse_array(file.read(name)) for name in file.namelist()}


def _check_members(file: zipfile.ZipFile, most: int) -> None:
    """Reading a member ends at the size that is listed."""
    members = file.infolist()
    if len(members) > _MAX_MEMBERS or sum(each.file_size for each in members) > most:
        raise ValueError("larger when unpacked than it may be")


@contextmanager
def open_weights(path: str | os.PathLike) -> Iterator[Any]:
    """A safetensors file of floating-point numbers, opened by its own library: names, shapes, and tensors one by one."""
    from safetensors import safe_open

    check_regular(path)
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            kind = file.get_slice(name).get_dtype()
            if kind not in _WEIGHTS:
                kinds = ", ".join(sorted(_WEIGHTS))
                raise ValueError(f"{name} is of {kind}, not of one of {kinds}")
        yield file


def read_weights(path: str | os.PathLike) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Finite tensors of floating-point numbers by name, on the CPU, and the header's texts, of a safetensors file."""
    with open_weights(path) as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
        header = file.metadata() or {}
    return as_weights(found), header


def as_weights(found: Any) -> dict[str, "Tensor"]:
    """Checks that something is a dictionary of finite tensors of floating-point numbers that are all there."""
    import torch

    if not isinstance(found, dict):
        raise ValueError("not a dictionary of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{str(name)[:80]} is not a tensor")
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or not value.is_floating_point():
            raise ValueError(f"{name} is not a tensor of plain floating-point numbers")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{name} repeats its values")
        # The sum tells without a mask as large as the tensor; of finite values it may be infinite, too.
        if not value.sum().isfinite() and not value.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")
    return {name: value.detach() for name, value in found.items()}


def read_pickle(path: str | os.PathLike) -> Any:
    """Tensors and plain values of a file of `torch.save`, on the CPU."""
    import torch

    check_regular(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            _check_members(file, os.path.getsize(path))  # torch compresses nothing
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch advises to load it otherwise
        raise ValueError("more than tensors and plain values, which could run code") from None
