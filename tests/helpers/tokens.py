"""What token ids stand for, to be read in tests."""

from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import (
    FIRST_BYTE_ID,
    FIRST_CHARACTER_ID,
    UNKNOWN_CHARACTER_ID,
    Vocabulary,
)


def token(vocabulary: Vocabulary, token_id: int) -> str:
    """ "a", "<0x61>", "<end>", "<speaker:slt>"."""
    for name, unknown in reversed(vocabulary.unknown_ids().items()):
        if token_id >= unknown:
            values = ("?", *vocabulary.conditioning[name])
            return f"<{name}:{values[token_id - unknown]}>"
    if vocabulary.subwords:
        return f"<subword {token_id}>"
    if token_id < FIRST_BYTE_ID:
        return ("<pad>", "<begin>", "<end>")[token_id]
    if vocabulary.unit == "bytes":
        return f"<0x{token_id - FIRST_BYTE_ID:02X}>"
    if token_id == UNKNOWN_CHARACTER_ID:
        return "<unknown>"
    return vocabulary.characters[token_id - FIRST_CHARACTER_ID]


def byte_tokenizer() -> UnitTokenizer:
    """UTF-8 bytes without conditioning."""
    return UnitTokenizer(Vocabulary())
