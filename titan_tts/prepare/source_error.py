"""Errors of audio files: of the file, or of the disk that it is on."""

import errno

from torchtitan.models.dit_tts.errors import InputError

# Errors of a path, not of the disk that it is on.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class SourceError(InputError):
    """A disk or store fails: the recording may be valid, so it is never left out as a corrupt one."""


def unreadable(path: str, error: OSError | ValueError) -> InputError:
    """The error of an audio file: a `SourceError` unless the path itself is wrong."""
    reason = getattr(error, "strerror", None) or error
    sentence = f"the audio file {path!r} cannot be read ({reason})"
    if "\\" in path:
        sentence += (
            "; it has backslashes, as on Windows: write paths with / and relative to the list"
        )
    if isinstance(error, OSError) and error.errno not in _NO_FILE:
        return SourceError(f"{sentence}; check the disk and its rights and start again")
    return InputError(sentence)
