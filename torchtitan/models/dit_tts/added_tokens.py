"""Parts of a text that are one token each, such as "[S1]" before a speaker's turn or "(laugh)": [encoder] added_tokens.

Inside a tokenizer each of them is one character of Unicode's private use area. Only the model reads them: no letters
of theirs count in a length or in word errors.
"""

import hashlib
import json
import re
from collections.abc import Sequence

import numpy as np

_FIRST = 0xE000
MAX_ADDED = 256


class AddedTokens:
    """Finds the tokens in texts; of two that begin at one place, the longer. From any thread."""

    def __init__(self, tokens: Sequence[str]):
        self.tokens = tuple(tokens)
        self.characters = "".join(chr(_FIRST + number) for number in range(len(tokens)))
        """one for each token"""
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._character_of = dict(zip(self.tokens, self.characters, strict=True))
        # A text that has such a character itself has no token there.
        self._own = dict.fromkeys(map(ord, self.characters), "\ufffd")

    @property
    def fingerprint(self) -> str:
        """A part of the name of a file of counts; empty without tokens."""
        if not self.tokens:
            return ""
        return "-" + hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]

    def pieces(self, text: str) -> list[tuple[str, str]]:
        """The text's parts in order: (character, the token) of a token, else (letters, "")."""
        if not self.tokens:
            return [(text, "")] if text else []
        found, end = [], 0
        for match in self._pattern.finditer(text):
            found.append((text[end : match.start()].translate(self._own), ""))
            found.append((self._character_of[match[0]], match[0]))
            end = match.end()
        found.append((text[end:].translate(self._own), ""))
        return [(part, token) for part, token in found if part]

    def joined(self, text: str) -> str:
        """The text with one character for each token."""
        return "".join(part for part, _ in self.pieces(text))

    def without(self, text: str) -> str:
        """The text without tokens and the blanks around them."""
        if not self.tokens:
            return text
        return " ".join(part.strip() for part, token in self.pieces(text) if not token).strip()

    def places(self, text: str) -> np.ndarray:
        """(characters + 1,) int64: where each character of the text, and its end, is in `joined`."""
        steps = [0]
        for part, token in self.pieces(text):
            steps += [1] + [0] * (len(token) - 1) if token else [1] * len(part)
        return np.cumsum(steps)


NO_TOKENS = AddedTokens(())
