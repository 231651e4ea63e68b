"""Files as every part of the project writes and names them: atomic writes, JSON lines, the user's
cache folder, local paths and URLs, short fingerprints."""

import glob
import hashlib
import json
import os
import re
import stat
import tempfile
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from torchtitan.models.dit_tts.bounded import parse_json, read_bytes
from torchtitan.models.dit_tts.errors import InputError

_MAX_LINES = 4 << 30  # bytes of a file of JSON lines
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Opens a new binary file that appears under `path` complete or not at all.

    The bytes go to a temporary name in the same folder (a rename is atomic only within one
    filesystem), are synced to disk and renamed. Several writers of the same path do not disturb each
    other: the last rename wins.
    """
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name[:100]}.{uuid.uuid4().hex}.tmp")
    # Not tempfile.mkstemp: its mode 0600 would survive the rename and lock out other users.
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(folder, name))
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # of a write: a disk that is full
            error.filename = os.fspath(path)
        raise
    sync_folder(folder)


def sync_folder(folder: str | os.PathLike) -> None:
    """Makes the names in a folder, as a rename changes them, or a file's content survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike, content: str | bytes) -> None:
    """Replaces a file at once: a reader or a crash sees the old content or the new, nothing between."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save_weights(tensors: dict[str, Any], path: Path, header: dict[str, str] | None = None) -> None:
    """Writes tensors as safetensors. Who may read its folder may read the file: the library's own mode is 0600."""
    from safetensors.torch import save_file

    save_file(tensors, path, header)
    path.chmod(path.parent.stat().st_mode & 0o666)


def sync_tree(folder: Path) -> None:
    """Brings all below a folder, and their names, to the disk: before the folder is renamed into its place."""
    for path in (*folder.rglob("*"), folder):
        sync_folder(path)


@contextmanager
def held(lock: Path, refusal: str, seconds: float = 0.0) -> Iterator[None]:
    """Holds a lock. Raises InputError with the sentence `refusal` where another process keeps it for so many seconds."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock, timeout=seconds):
            yield
    except Timeout:
        raise InputError(refusal) from None


class JsonLines:
    """A file of one JSON object per line, each with its `step`."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All complete lines. A line that a kill or a power cut has corrupted is left out."""
        return self._parts()[0]

    def _parts(self) -> tuple[list[dict[str, Any]], list[bytes]]:
        """The rows, and the lines that are not rows."""
        rows, corrupt = [], []
        content = read_bytes(self.path, _MAX_LINES) if self.path.exists() else b""
        *lines, torn = content.split(b"\n")
        for line in lines:
            try:
                row = parse_json(line)
                rows.append({"step": int(row["step"]), **row})
            except (ValueError, TypeError, KeyError):
                corrupt.append(line)
        return rows, [line for line in (*corrupt, torn) if line]

    def keep_until(self, step: int) -> int:
        """Drops lines of steps after `step`, which a resumed run trains again. Returns the number of
        corrupt lines, which are set aside in NAME.corrupt."""
        rows, corrupt = self._parts()
        if corrupt:
            with open(f"{self.path}.corrupt", "ab") as aside:
                aside.write(b"\n".join(corrupt) + b"\n")
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
            write_atomic(self.path, "".join(kept))
        return len(corrupt)

    def append(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            try:
                file.write((json.dumps(row) + "\n").encode())
            except OSError as error:
                error.filename = str(self.path)
                raise


def is_remote(path: str) -> bool:
    """True if `path` has a URL scheme; `file://` is a local file."""
    return _SCHEME.match(path) is not None and not path.startswith("file://")


def local_path(path: str) -> str:
    """The absolute path of a local file or folder, with `~` and `file://` resolved."""
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    return os.path.abspath(os.path.expanduser(path))


def expand_braces(path: str) -> list[str]:
    """Expand the braces of an entry of [data] path; a path without braces is returned as it is."""
    if "{" not in path or (not is_remote(path) and os.path.exists(local_path(path))):
        return [path]
    from braceexpand import braceexpand

    try:
        return list(braceexpand(path, escape=False))
    except ValueError as error:
        raise InputError(
            f"[data] path '{path}' is not a pattern ({error}); write one such as "
            "shard-{000000..000099}.tar"
        ) from None


SHARD_SUFFIX = ".tar"


def matching_shards(path: str) -> list[str]:
    """The files that the absolute path of a shard stands for, or a glob of such."""
    matches = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    return [match for match in matches if match.endswith(SHARD_SUFFIX) and os.path.isfile(match)]


def shards_in(folder: str | os.PathLike, suffix: str = SHARD_SUFFIX) -> list[str]:
    """The shards of a folder, not below it. A hidden file is somebody's unfinished or foreign one."""
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    return [os.path.join(folder, name) for name in names if name.endswith(suffix)]


def check_writable(path: str | os.PathLike, option: str) -> None:
    """Raises InputError where no file can be written at `path`, whose folders may be missing yet."""
    path = Path(path).expanduser().absolute()
    try:
        folder = next((parent for parent in path.parents if parent.exists()), path)
        with tempfile.TemporaryFile(dir=folder):  # rights alone do not tell, and do not bind root
            pass
        try:
            fits = stat.S_ISREG(os.stat(path).st_mode)  # a device would be replaced by a file
        except FileNotFoundError:
            fits = True
    except (OSError, ValueError):  # ValueError: a NUL
        fits = False
    if not fits:
        raise InputError(f"{option} = {path} cannot be written; give another path")


def new_folder_path(path: str | os.PathLike, option: str) -> Path:
    """The absolute path of a folder that is absent or empty and can be written. Raises InputError if it is not."""
    folder = Path(path).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{option} = {folder} exists already; give a new folder")
    check_writable(folder / "file", option)
    return folder


def require_hub() -> None:
    """Asks once whether the Hugging Face hub is there: its client asks six times for each file, with a line
    on the terminal for each.

    Raises:
        ConnectionError: it does not answer within 10 seconds, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # the HTTP clients of its versions have no common kind of error
        raise ConnectionError(
            f"not complete on this machine, and {constants.ENDPOINT} cannot be reached"
        ) from error


def load_local_or_hub(load: Callable[..., Any], name: str, *, download: bool = True) -> Any:
    """load(local_files_only=...) of a pretrained model: of what this machine has, else of the hub.

    Args:
        name: folder or hub name; a folder is never looked for on the hub.
        download: whether the hub may be asked.
    """
    if not download or os.path.isdir(name) or name.startswith((".", "/", "~")):
        return load(local_files_only=True)
    try:
        return load(local_files_only=True)
    except Exception:  # the libraries' validators raise kinds of their own
        require_hub()
        return load(local_files_only=False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bars, advice to programmers and table of unexpected or missing keys;
    whoever loads a model checks what matters."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def user_cache_folder(name: str) -> str:
    """`name` in this program's part of the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "titan-tts", name)


def keep_compiled_kernels() -> None:
    """Lets the compiler keep its kernels in the user's cache folder, so that only a configuration's first start compiles.
    TORCHINDUCTOR_CACHE_DIR names another folder. To be called before the compiler is imported, whose import fails where
    it cannot make the folder: the kernels of a user without a home that can be written stay where torch has them."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = user_cache_folder("compile")
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def fingerprint(*parts: str | bytes) -> str:
    """16 hex digits that change with any of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def file_name(key: str) -> str:
    """A key, which may have slashes, as the name of a file."""
    kept = (c if c in "._-" or unicodedata.category(c)[0] in "LMN" else "\0" for c in key)
    cleaned = re.sub("\0+", "_", "".join(kept)).lstrip(".") or "_"
    return cleaned.encode()[:120].decode(errors="ignore")


def nfc(text: str) -> str:
    """The text in composed Unicode: "o" and a combining diaeresis become the one character "ö"."""
    return unicodedata.normalize("NFC", text)


def path_on_disk(folder: str, name: str) -> str:
    """A path below `folder`, or that composed or decomposed (as macOS writes names) if only this exists."""
    if name.isascii():
        return name
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    return next((each for each in forms if os.path.exists(os.path.join(folder, each))), name)


def unique(names: Sequence[str], alike: Callable[[str], str] = str) -> list[str]:
    """The names, the second and later of those that `alike` makes equal with a number behind them."""
    taken: set[str] = set()
    found = []
    for name in names:
        number, one = 2, name
        while alike(one) in taken:
            number, one = number + 1, f"{name}-{number}"
        taken.add(alike(one))
        found.append(one)
    return found
