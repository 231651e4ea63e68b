"""Text configs of encoders as the hub has them, so that sizes are known before any download."""

from typing import Any

_GEMMA3 = {"head_dim": 256, "vocab_size": 262_144, "query_pre_attn_scalar": 256}

KNOWN_SIZES: dict[str, dict[str, Any]] = {
    "google/t5gemma-2-270m-270m": {
        "model_type": "t5gemma2_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        **_GEMMA3,
    },
    "google/t5gemma-2-1b-1b": {
        "model_type": "t5gemma2_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        **_GEMMA3,
    },
    "google/t5gemma-2-4b-4b": {
        "model_type": "t5gemma2_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        **_GEMMA3,
    },
    "google-t5/t5-base": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
    },
}
