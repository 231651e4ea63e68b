"""Reads the test lists of Seed-TTS-eval: texts to say, each in the voice of a recording.

name|prompt text|prompt wav|text to say[|recording of that text]

Paths are relative to the list; without the fifth field the recording is wavs/NAME.wav, if it is there.
"""

from pathlib import Path

from titan_tts.records.utterance import HELDOUT, Reference, Utterance
from torchtitan.models.dit_tts.errors import InputError


def is_list(path: str) -> bool:
    """True if the first line of a file has the fields of a list; False for any other file and for folders."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    lines = start.decode("utf-8-sig", "replace").splitlines()
    first = next((line for line in lines if line.strip()), "")
    # Audio, a table or a tar holds a zero.
    return b"\0" not in start and len(first.split("|")) in (4, 5)


def read_list(path: str) -> list[Utterance]:
    """The requests of a list's lines. `audio` is the recording of the text, and empty where there is none."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a test list in UTF-8") from None
    numbered = [(n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path}: is empty; give a test list")
    return [_read_line(f"{path} line {n}", line, Path(path).parent) for n, line in numbered]


def _read_line(where: str, line: str, root: Path) -> Utterance:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) not in (4, 5) or not all(fields[i] for i in (0, 2, 3)):
        raise InputError(
            f"{where}: is {line[:100]!r}, but name|prompt text|prompt wav|text to say is needed, with "
            "the recording of that text as an optional fifth field"
        )
    name, said, reference, text, recording = [*fields, ""][:5]
    named = [root / each for each in (reference, recording) if each]
    for path in named:
        if not path.is_file():
            raise InputError(f"{where}: {path} does not exist; correct the path, or copy it there")
    beside = root / "wavs" / f"{name}.wav"
    audio = named[1] if recording else beside
    given = Reference((str(named[0]),), said)
    files = {"file": str(audio)} if audio.is_file() else {}
    return Utterance(name, text, "", {"text": text}, files, given, HELDOUT)
