"""Reads published test lists: texts to say, each in the voice of a recording.

seed_tts          name|prompt text|prompt wav|text to say[|recording of that text]
                  paths relative to the list; without the fifth field wavs/NAME.wav, if it is there
librispeech_pc    six fields between tabs: utterance, seconds and text of the reference, then of what
                  to say; utterance SPEAKER-CHAPTER-NUMBER lies in ROOT/SPEAKER/CHAPTER
"""

from pathlib import Path

from titan_tts.records.utterance import HELDOUT, Reference, Utterance
from torchtitan.models.dit_tts.errors import InputError

SEED_TTS, LIBRISPEECH_PC = "seed_tts", "librispeech_pc"


def find_list_format(path: str) -> str | None:
    """The format of a list by its first line; None for any other file and for folders."""
    if not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    if b"\0" in start:  # audio, a table or a tar
        return None
    lines = start.decode("utf-8-sig", "replace").splitlines()
    first = next((line for line in lines if line.strip()), "")
    if len(_fields(first, "\t")) == 6 and _path_of(first.split("\t")[0]):
        return LIBRISPEECH_PC
    return SEED_TTS if len(first.split("|")) in (4, 5) else None


def read_list(path: str, kind: str, audio_root: str = "") -> list[Utterance]:
    """What the lines of a list ask for, whose paths can be opened as they are; `audio_root` is ROOT of a librispeech_pc
    list. `audio` is the recording of the text, and empty where there is none."""
    if kind == LIBRISPEECH_PC and not Path(audio_root or "/nowhere").is_dir():
        raise InputError(
            f"--audio-root = {audio_root!r}, but for the list {path} it must be the folder of "
            "SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac, such as LibriSpeech/test-clean"
        )
    read = _seed_tts if kind == SEED_TTS else _librispeech_pc
    root = Path(path).parent if kind == SEED_TTS else Path(audio_root)
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a test list in UTF-8") from None
    numbered = [(n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path}: is empty; give a test list")
    return [read(f"{path} line {number}", line, root) for number, line in numbered]


def _fields(line: str, separator: str) -> list[str]:
    return [field.strip() for field in line.split(separator)]


def _seed_tts(where: str, line: str, root: Path) -> Utterance:
    fields = _fields(line, "|")
    if len(fields) not in (4, 5) or not all(fields[i] for i in (0, 2, 3)):
        raise InputError(
            f"{where}: is {line[:100]!r}, but name|prompt text|prompt wav|text to say is needed, with "
            "the recording of that text as an optional fifth field"
        )
    name, said, reference, text = fields[:4]
    recording = _if_there(root / "wavs" / f"{name}.wav")
    if fields[4:] and fields[4]:
        recording = _existing(where, root / fields[4])
    audio = _existing(where, root / reference)
    return _utterance(name, text, "", recording, Reference((str(audio),), said))


def _librispeech_pc(where: str, line: str, root: Path) -> Utterance:
    fields = _fields(line, "\t")
    stems = [_path_of(fields[i]) for i in (0, 3) if i < len(fields)]
    if len(fields) != 6 or not all(stems) or not fields[5]:
        raise InputError(
            f"{where}: is {line[:100]!r}, but six tab-separated fields are needed: utterance, seconds and "
            "text of the reference, then of the target; an utterance is SPEAKER-CHAPTER-NUMBER"
        )
    reference, recording = (root / f"{stem}.flac" for stem in stems)
    audio, speaker = _existing(where, reference), fields[3].split("-")[0]
    given = Reference((str(audio),), fields[2])
    return _utterance(fields[3], fields[5], speaker, _if_there(recording), given)


def _utterance(
    name: str, text: str, speaker: str, recording: Path | None, reference: Reference
) -> Utterance:
    labels = {"text": text} | ({"speaker": speaker} if speaker else {})
    audio = {"file": str(recording)} if recording else {}
    return Utterance(name, text, speaker, labels, audio, reference, HELDOUT)


def _path_of(name: str) -> str | None:
    """SPEAKER-CHAPTER-NUMBER as SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER; None for other names."""
    parts = name.strip().split("-")
    if len(parts) != 3 or not all(part.isalnum() for part in parts):
        return None
    return f"{parts[0]}/{parts[1]}/{name.strip()}"


def _if_there(path: Path) -> Path | None:
    return path if path.is_file() else None


def _existing(where: str, path: Path) -> Path:
    if not path.is_file():
        raise InputError(
            f"{where}: {path} does not exist; correct the path, or copy the list's audio there"
        )
    return path
