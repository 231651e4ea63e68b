"""Tars written by Python's tarfile, member by member."""

import io
import tarfile

import numpy as np


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def write_tar(path, members, tar_format=tarfile.GNU_FORMAT):
    """`members`: (name, bytes) pairs in the order they are written."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
