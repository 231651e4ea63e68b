"""Tokenizer of the learned byte encoder."""

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.models.dit_tts.model.args import BYTE_VOCAB_SIZE


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as ids, between a begin and an end token. Any text in any language is valid.

    Ids: 0 padding, 1 begin, 2 end, byte b is b + 3.
    """

    pad_id = 0
    begin_id = 1
    end_id = 2
    num_special_tokens = 2
    """ids that `encode` adds to the bytes"""

    vocab_size = BYTE_VOCAB_SIZE

    def __init__(self) -> None:
        self.eos_id = self.end_id

    def encode(self, text: str) -> list[int]:
        return [self.begin_id, *(byte + 3 for byte in text.encode("utf-8")), self.end_id]

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 3 for i in ids if i >= 3).decode("utf-8", errors="replace")

    def get_vocab_size(self) -> int:
        return self.vocab_size


def build_tokenizer(job_config: JobConfig) -> ByteTokenizer:
    """The tokenizer that the config's text encoder needs."""
    return ByteTokenizer()
