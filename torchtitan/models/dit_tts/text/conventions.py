"""How the models of other projects expect their texts: [encoder] convention. Each rule is applied to every text, in
training as in generation, before it becomes ids.
"""

from collections.abc import Callable

ECHO = "echo"

_ECHO_REPLACED = {
    "…": "...",
    "’": "'",
    "“": '"',
    "”": '"',
    "\n": " ",
    ":": ",",
    ";": ",",
    "—": ", ",
}
_ECHO_SPEAKER = "[S1] "
"""tag of the first speaker, which begins every text that names no speaker"""


def _echo_text(text: str) -> str:
    for old, new in _ECHO_REPLACED.items():
        text = text.replace(old, new)
    tagged = text.startswith(("[", "(")) or "S1" in text or "S2" in text
    return text if tagged else _ECHO_SPEAKER + text


NORMALIZERS: dict[str, Callable[[str], str]] = {"": str, ECHO: _echo_text}
"""Value of [encoder] convention -> what it makes of a text"""

MAX_ADDED_BYTES = len(_ECHO_SPEAKER)
"""by which Echo-TTS's rules make a text longer, at most"""
