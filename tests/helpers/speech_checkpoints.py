"""Small random Whisper and speaker models, saved in the layout that the hub's have."""

import json
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    GenerationConfig,
    Wav2Vec2FeatureExtractor,
    WavLMConfig,
    WavLMForXVector,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

LANGUAGES = ("en", "de", "zh")
_TASKS = "<|translate|> <|transcribe|> <|startoflm|> <|startofprev|> <|nospeech|> <|notimestamps|>"
_SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{each}|>" for each in LANGUAGES)]
_SPECIAL += _TASKS.split()


def write_resemblyzer(folder: Path) -> Path:
    """A package with random weights beside which nothing of Resemblyzer is needed; returns the folder for the path."""
    from torchtitan.models.dit_tts.speech.scoring.voice_encoder import VoiceEncoder

    package = folder / "resemblyzer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody needs to import it')\n")
    torch.manual_seed(0)
    other = {"similarity_weight": torch.ones(1), "similarity_bias": torch.ones(1)}
    state = VoiceEncoder().state_dict() | other
    torch.save({"step": 1, "model_state": state}, package / "pretrained.pt")
    return folder


def noise(seconds: float, seed: int = 0) -> torch.Tensor:
    """At 16 kHz."""
    generator = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(int(seconds * 16_000), generator=generator)


def write_tiny_whisper(folder: str | Path, multilingual: bool = True, positions: int = 40) -> Path:
    """A Whisper, 32 wide, whose pieces are letters; it writes down nonsense that depends on the sound.

    Args:
        positions: of the decoder; faster-whisper needs 448.
    """
    folder = Path(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    ids = {token: len(letters) + number for number, token in enumerate(_SPECIAL)}
    folder.mkdir(parents=True, exist_ok=True)
    spelling = folder / "normalizer.json"
    spelling.write_text(json.dumps({"colour": "color"}))
    tokenizer = WhisperTokenizer(vocabulary, [], str(spelling), errors="replace")
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL[1:]})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(1501)], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<|notimestamps|>") == ids["<|notimestamps|>"]
    end = ids["<|endoftext|>"]
    sizes = dict(layers=1, attention_heads=2, ffn_dim=64)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    tokens |= {"suppress_tokens": [], "begin_suppress_tokens": [end]}
    tokens["decoder_start_token_id"] = ids["<|startoftranscript|>"]
    config = WhisperConfig(
        **{f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in sizes.items()},
        **dict(vocab_size=len(tokenizer), d_model=32, max_target_positions=positions, **tokens),
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than as drawn, or the text would not depend on the sound.
            parameter.add_((0.8 if "attn" in name else 0.2) * torch.randn_like(parameter))
        # Letters rather than times.
        model.model.decoder.embed_tokens.weight[ids["<|notimestamps|>"] + 1 :] *= 0.2
    tokens["no_timestamps_token_id"] = ids["<|notimestamps|>"]
    tokens["prev_sot_token_id"] = ids["<|startofprev|>"]
    if multilingual:
        tokens["lang_to_id"] = {f"<|{each}|>": ids[f"<|{each}|>"] for each in LANGUAGES}
        tokens["task_to_id"] = {each: ids[f"<|{each}|>"] for each in ("translate", "transcribe")}
    limits = {"max_length": positions, "max_initial_timestamp_index": 50}
    model.generation_config = GenerationConfig(**tokens, **limits, is_multilingual=multilingual)
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)  # preprocessor_config.json
    tokenizer.save_pretrained(folder)
    return folder


def write_tiny_wavlm(folder: str | Path) -> Path:
    """A WavLM with an x-vector head of 12 values, 32 wide, with the strides of the hub's."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    sizes |= dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_buckets=32)
    dims = dict(conv_dim=(16,) * 7, tdnn_dim=(16, 16, 16, 16, 32), xvector_output_dim=12)
    config = WavLMConfig(**sizes, **dims, use_weighted_layer_sum=True)
    torch.manual_seed(0)
    WavLMForXVector(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    return Path(folder)
