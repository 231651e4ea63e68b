"""Small random text encoders with tokenizers, saved as full models in the layout that the hub's have."""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.models.t5gemma2 import T5Gemma2Config, T5Gemma2ForConditionalGeneration

from tools.harness.synthetic import DIGITS

VOCAB_SIZE = 512

_TEXT = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_TEXT |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1}
_TEXT |= {"query_pre_attn_scalar": 16, "sliding_window": 8}
_TEXT["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
_VISION = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32}
_VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}


def write_tiny_t5gemma2(folder: str | Path, seed: int = 0, tokenizer: bool = True) -> Path:
    """A complete T5Gemma2, text and vision encoder and decoder; the text encoder has 243,520 parameters."""
    encoder = {"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": 4}
    encoder |= {"boi_token_index": 508, "eoi_token_index": 509, "image_token_index": 510}
    config = T5Gemma2Config(encoder=encoder, decoder=_TEXT, image_token_index=510)
    torch.manual_seed(seed)
    return _save(T5Gemma2ForConditionalGeneration(config), folder, tokenizer and gemma_tokenizer())


def write_tiny_t5(folder: str | Path, seed: int = 0, tokenizer: bool = True) -> Path:
    """A complete T5, encoder and decoder, 48 wide."""
    sizes = dict(d_model=48, d_kv=12, d_ff=96, num_layers=3, num_heads=4)
    config = T5Config(vocab_size=VOCAB_SIZE, **sizes, dropout_rate=0.1, decoder_start_token_id=0)
    torch.manual_seed(seed)
    return _save(T5ForConditionalGeneration(config), folder, tokenizer and t5_tokenizer())


def write_tiny_bert(folder: str | Path, seed: int = 0) -> Path:
    """A masked language model with absolute positions, which knows no pooler."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = BertConfig(vocab_size=VOCAB_SIZE, **sizes, max_position_embeddings=128)
    torch.manual_seed(seed)
    return _save(BertForMaskedLM(config), folder, t5_tokenizer())


def _save(model: torch.nn.Module, folder: str | Path, tokenizer) -> Path:
    # As drawn, norms are the identity and biases zero, and a mistake with them would not be seen.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    return Path(folder)


def _bpe(special_tokens: list[str]) -> Tokenizer:
    """Pieces of the digits' names, and the 256 bytes for all other text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 12,
        special_tokens=[*special_tokens, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    sentences = [" ".join(DIGITS[i:] + DIGITS[:i]) for i in range(len(DIGITS))]
    tokenizer.train_from_iterator(sentences, trainer)
    return _bytes_are_no_specials(tokenizer, special_tokens)


def _bytes_are_no_specials(tokenizer: Tokenizer, special_tokens: list[str]) -> Tokenizer:
    """The byte pieces were kept by the trainer as special tokens; in the hub's they are pieces."""
    contents = json.loads(tokenizer.to_str())
    contents["added_tokens"] = [
        token for token in contents["added_tokens"] if token["content"] in special_tokens
    ]
    return Tokenizer.from_str(json.dumps(contents))


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Begin before the text, padding on the left by default."""
    tokenizer = _bpe(["<pad>", "<eos>", "<bos>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    tokens = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, padding_side="left")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """End behind the text, padding on the right."""
    tokenizer = _bpe(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


WRITERS = {"t5gemma2": write_tiny_t5gemma2, "t5": write_tiny_t5, "bert": write_tiny_bert}


@torch.no_grad()
def encoded(encoder, texts: list[list[int]]) -> list[torch.Tensor]:
    """Features (n_i, h) of each text of n_i ids, all in one padded batch."""
    mask = np.arange(max(map(len, texts))) < np.array([[len(ids)] for ids in texts])
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[torch.from_numpy(mask)] = torch.tensor(sum(texts, []))
    hidden = encoder(ids, mask, encoder.rows(mask))
    return [row[: len(text)].clone() for row, text in zip(hidden, texts)]
