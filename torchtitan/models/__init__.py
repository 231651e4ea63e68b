"""Upstream's model families and ours, `dit_tts`."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

_FAMILIES = frozenset(
    ["deepseek_v3", "dit_tts", "flux", "gpt_oss", "llama3", "llama3_ft", "llama4", "qwen3"]
)


def __getattr__(name: str) -> frozenset[str]:
    """`_supported_models`, which upstream's `get_train_spec` reads just before it loads a family.

    Upstream registers its float8 and mx converters in `torchtitan/__init__.py`, which ours replaces. They
    are registered here instead: their import is slow and needs triton, and only a family needs them.
    """
    if name != "_supported_models":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torchtitan.components.quantization  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
    return _FAMILIES
