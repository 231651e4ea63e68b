"""Folders of recordings with a text file for each: LibriTTS-R."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from titan_tts.prepare.formats import AUDIO_SUFFIXES, say_unlisted
from titan_tts.prepare.settings import Options
from titan_tts.records.columns import make_utterance, sample_key
from titan_tts.records.json_lines import NOT_UTF8
from titan_tts.records.utterance import Unusable, Utterance
from torchtitan.models.dit_tts.data.heldout import split_of
from torchtitan.models.dit_tts.errors import require

_NORMALIZED, _ORIGINAL = ".normalized.txt", ".original.txt"
_TREE_DEPTH = 3  # folders between the source and its recordings, at most


class LibriTTSR:
    """SUBSET/SPEAKER/CHAPTER/UTT.wav with UTT.normalized.txt, as in LibriTTS and LibriTTS-R.

    The source is the folder of the subsets, or one subset under its name. Subsets that begin with dev
    and test are held out.
    """

    self_contained = False

    def __init__(self, options: Options):
        self.root, self.options = os.path.abspath(options.source), options
        require(
            self.recognizes(self.root),
            f"{self.root}: has no SUBSET/SPEAKER/CHAPTER/UTT{_NORMALIZED}, as LibriTTS-R has",
        )

    @classmethod
    def recognizes(cls, source: str) -> bool:
        return os.path.isdir(source) and any(
            os.sep in folder and any(name.endswith(_NORMALIZED) for name in names)
            for folder, names in islice(_walk(source), 200)  # all folders would take long
        )

    def files(self) -> dict[str, str]:
        return {}

    def items(self) -> Iterator[Utterance | Unusable]:
        for folder, names in _walk(self.root, say_unlisted):
            for name in names:
                if name.endswith(AUDIO_SUFFIXES):
                    yield self._item(folder, name)

    def _item(self, folder: str, name: str) -> Utterance | Unusable:
        relative, stem = os.path.join(folder, name), os.path.splitext(name)[0]
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
        for suffix in (_NORMALIZED, _ORIGINAL):
            path = Path(self.root, folder, stem + suffix)
            try:
                texts[suffix] = path.read_text("utf-8").strip() if path.exists() else None
            except UnicodeDecodeError:
                return Unusable(relative, f"has a {path.name} that {NOT_UTF8}")
        original = texts[_ORIGINAL]
        text = original if texts[_NORMALIZED] is None else texts[_NORMALIZED]
        if text is None:
            return Unusable(relative, f"has no {stem}{_NORMALIZED} next to it")
        row = {"text": text, "original_text": original, "speaker": speaker, "chapter": chapter}
        row |= {"subset": subset, "split": split_of(subset)}
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
