"""The folder of compiled kernels, Inductor's and Triton's, so that only the first start of a configuration compiles.
Ranks, runs and versions of torch may share it."""

import os
import tempfile

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import local_path, user_cache_folder

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def set_compile_cache(config: JobConfig) -> str:
    """Sets the folder of a run that compiles. Returns a sentence for the log, empty if nothing compiles."""
    if not config.compile.enable and config.optimizer.state_dtype != "8bit":
        return ""
    return set_compile_cache_folder(config.compile.cache_folder)


def set_compile_cache_folder(path: str) -> str:
    """Sets the folder ([compile] cache_folder) for this process and its children. Inductor must not be
    imported before. Returns a sentence for the log."""
    given = os.environ.get(_VARIABLE)
    folder = given or local_path(path or user_cache_folder("compile"))
    try:
        os.makedirs(folder, exist_ok=True)
        empty = not os.listdir(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        key = f"the environment variable {_VARIABLE}" if given else "[compile] cache_folder"
        raise InputError(
            f"{key}: no files can be written in {folder} ({error.strerror}); give another path"
        ) from error
    os.environ[_VARIABLE] = folder
    state = "empty: the first steps compile" if empty else "what earlier runs compiled is taken"
    return f"Compile cache: {folder} ({f'{_VARIABLE}; ' if given else ''}{state})"
