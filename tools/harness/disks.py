"""Disks that a test can fill."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """The new folder `folder`, on a tmpfs of its own of this size, which root may mount; 0: on the disk that
    it is on."""
    folder.mkdir()
    if mib:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
        subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        if mib:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full_disk(folder: Path, left: int, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Fills the disk of `folder` up to `left` bytes, as long as `goes_on()`; frees it at the end."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        while (free := disk_usage(folder).free) > left and goes_on():
            try:
                file.write(bytes(min(1 << 20, free - left)))
            except OSError:
                break
    try:
        yield
    finally:
        filler.unlink()
