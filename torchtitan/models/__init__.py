"""Upstream's model families and ours, `dit_tts`."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

_supported_models = frozenset(
    [
        "deepseek_v3",
        "dit_tts",
        "flux",
        "gpt_oss",
        "llama3",
        "llama3_ft",
        "llama4",
        "qwen3",
    ]
)
