"""Folders of recordings with their texts beside them: LibriTTS-R."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from titan_tts.prepare.formats import say_unlisted
from titan_tts.prepare.settings import Options
from titan_tts.records.columns import make_utterance, sample_key
from titan_tts.records.json_lines import NOT_UTF8
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.data.heldout import split_of
from torchtitan.models.dit_tts.errors import InputError

_AUDIO_SUFFIXES = (".wav", ".flac", ".opus", ".ogg", ".mp3")
_TEXT_SUFFIXES = (".normalized.txt", ".original.txt")
_TREE_DEPTH = 3  # folders between the source and its recordings, at most


class LibriTTSR:
    """SUBSET/SPEAKER/CHAPTER/UTT.wav with UTT.normalized.txt, as in LibriTTS and LibriTTS-R.

    The source is the folder of the subsets, or one subset under its name. Subsets that begin with dev
    and test are held out.
    """

    self_contained = False

    def __init__(self, options: Options):
        self.root, self.options = os.path.abspath(options.source), options
        if not self.recognizes(self.root):
            raise InputError(
                f"{self.root}: has no UTT.normalized.txt at most {_TREE_DEPTH} folders below, as "
                "LibriTTS-R does"
            )

    @classmethod
    def recognizes(cls, source: str) -> bool:
        if not os.path.isdir(source):
            return False
        return any(
            os.sep in folder and any(name.endswith(_TEXT_SUFFIXES[0]) for name in names)
            for folder, names in islice(_walk(source), 200)  # all folders would take long
        )

    def files(self) -> dict[str, str]:
        return {}

    def items(self) -> Iterator[Utterance | Unusable]:
        for folder, names in _walk(self.root, say_unlisted):
            present = set(names)
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix in _AUDIO_SUFFIXES:
                    yield self._item(folder, stem, name, present)

    def _item(self, folder: str, stem: str, name: str, present: set[str]) -> Utterance | Unusable:
        relative = os.path.join(folder, name)
        parts = folder.split(os.sep)
        own_name = os.path.basename(self.root)
        # Without it a speaker's folder would count as the subset.
        if len(parts) == 2 and split_of(own_name) and not split_of(parts[0]):
            parts = [own_name, *parts]
        if len(parts) != 3:
            return Unusable(
                relative,
                "does not lie in SUBSET/SPEAKER/CHAPTER below the source, nor in SPEAKER/CHAPTER of a "
                "source whose name begins with train, dev or test",
            )
        subset, speaker, chapter = parts
        texts = {}
        for suffix in _TEXT_SUFFIXES:
            if stem + suffix in present:
                try:
                    text = Path(self.root, folder, stem + suffix).read_text("utf-8")
                except UnicodeDecodeError:
                    return Unusable(relative, f"has a {stem}{suffix} that {NOT_UTF8}")
                texts[suffix] = text.strip()
        if not texts:
            return Unusable(relative, f"has no {stem}{_TEXT_SUFFIXES[0]} beside it")
        original = texts.get(_TEXT_SUFFIXES[1])
        row = {
            "text": texts.get(_TEXT_SUFFIXES[0], original),
            "original_text": original,
            "speaker": speaker,
            "chapter": chapter,
            "subset": subset,
            "split": split_of(subset),
        }
        return make_utterance(row, sample_key(stem), {"file": relative}, self.options)


def _walk(
    root: str, unlisted: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """(folder relative to root, its sorted file names), sorted, hidden ones left out."""
    walk = os.walk(root, onerror=unlisted, followlinks=True)  # no deeper than _TREE_DEPTH
    for folder, below, names in walk:
        relative = os.path.relpath(folder, root)
        below[:] = sorted(name for name in below if not name.startswith("."))
        if relative.count(os.sep) >= _TREE_DEPTH - 1 and relative != ".":
            below.clear()
        if relative != "." and names:
            yield relative, sorted(name for name in names if not name.startswith("."))
