"""The texts that models of other projects expect: [encoder] convention. Each rule is applied to every text, in
training as in generation, before it becomes ids.
"""

import re
import unicodedata
from collections.abc import Callable, Container, Mapping

ECHO, IRODORI = "echo", "irodori"

# The opening counterpart of ” stays: their code names this one twice.
_ECHO = str.maketrans(dict(zip("…’”\n:;—", ("...", "'", '"', " ", ",", ",", ", "))))
_ECHO_SPEAKER = "[S1] "
"""tag of the first speaker, which begins every text that names no speaker"""

MAX_ADDED_BYTES = len(_ECHO_SPEAKER)
"""by which Echo-TTS's rules make a text longer, at most"""

_LEFT_OUT = r"\\\[n\\\]|\[n\]|[\t\u3000;▼♀♂《》≪≫①-⑥\u02d7\u2010-\u2015\u2043\u2212\u23af\u23e4\u2500\u2501\u2e3a\u2e3b]"
_IRODORI_LEFT_OUT = re.compile(_LEFT_OUT)
_IRODORI_LETTERS = str.maketrans("？！♥●◯〇\uff5e\u301c", "?!♡○○○ーー")
_BRACKETS = dict(zip("「『（【(", "」』）】)", strict=True))


def _echo_text(text: str) -> str:
    text = text.translate(_ECHO)
    tagged = text.startswith(("[", "(")) or "S1" in text or "S2" in text
    return text if tagged else _ECHO_SPEAKER + text


def _irodori_text(text: str) -> str:
    text = _IRODORI_LEFT_OUT.sub("", text).translate(_IRODORI_LETTERS)
    text = re.sub("…{3,}", "……", text)
    while _is_bracketed(text):
        text = text[1:-1]
    text = unicodedata.normalize("NFKC", text)
    return text.replace("...", "…").replace("..", "…").strip()


def _is_bracketed(text: str) -> bool:
    """True if one pair of brackets encloses the whole text."""
    closing = _BRACKETS.get(text[:1])
    if closing is None or len(text) < 2 or text[-1] != closing:
        return False
    depth = 0
    for character in text[:-1]:
        depth += (character == text[0]) - (character == closing)
        if depth == 0:
            return False
    return depth == 1


_LIKE = {",": ";:—–)]}", ".": "…", "": '([{"“”„«»¡¿'}
_PHONES_LIKE = {"x": "k", "ɬ": "l", "ç": "h", "ɲ": "n", "ʲ": ""}
"""what espeak-ng says in few words of English: Bach, Llandudno, Utrecht, jalapeño, Argyll"""
_TWICE = re.compile(r"[\s,]+(?=[.,!?])")


def mark_table(characters: Container[str], phones: bool = False) -> dict[int, str]:
    """Marks, and rare phones, that are not among a model's `characters` -> the one among these that is read alike, or
    nothing."""
    marks = {mark: like if like in characters else "" for like in _LIKE for mark in _LIKE[like]}
    known = {p: like for p, like in _PHONES_LIKE.items() if not like or like in characters}
    alike = (marks | known) if phones else marks
    return {ord(each): like for each, like in alike.items() if each not in characters}


def with_known_marks(text: str, table: Mapping[int, str]) -> str:
    """A text, or its phones, with the marks of `mark_table`, never longer; as it is where nothing else is in it."""
    found = text.translate(table)
    return text if found == text else " ".join(_TWICE.sub("", found).split()) or text


NORMALIZERS: dict[str, Callable[[str], str]] = {"": str, ECHO: _echo_text, IRODORI: _irodori_text}
"""Value of [encoder] convention -> what it makes of a text"""
