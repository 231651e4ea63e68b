"""Names of figures with their units, and figures and factors' levels as people read them."""

from collections.abc import Iterable, Mapping
from typing import Any

from titan_tts.grids.effects import NO_ALTERNATIVES
from titan_tts.report.words import counted, number

UNITS = {
    "samples_per_second": "samples/s",
    "audio_seconds_per_second": "seconds of audio per second",
    "seconds_per_step": "s/step",
    "mfu": "MFU %",
    "goodput_mfu": "goodput MFU %",
    "hfu": "HFU %",
    "tflops_per_device": "TFLOP/s per device",
    "peak_tflops": "peak TFLOP/s",
    "peak_allocated_gib": "allocated GiB",
    "peak_reserved_gib": "reserved GiB",
    "loss": "loss",
}
"""Figure -> the head of its column, and the label of its axis"""

_NAMELESS = (*NO_ALTERNATIVES, "backend", "layout", "precision", "optimizer")
"""Factors whose level says enough without their name"""
_UNSAID = {"backend": "torchtitan", "tensor_parallel": 1, "accumulation": 1}
_NOUNS = {"gpus": "GPU", "nodes": "node"}


def short_name(figure: str) -> str:
    return UNITS[figure].removesuffix(" %")


def figure_text(name: str, value: float | None) -> str:
    """A figure in the unit of UNITS."""
    if value is not None and UNITS[name].endswith("%"):
        value *= 100
    return number(value)


def _level(name: str, value: Any) -> str:
    """compile default, 8 GPUs, fsdp"""
    if value is None:
        return f"{name} not given"
    if name in _NOUNS:
        return counted(value, _NOUNS[name])
    return str(value) if name in _NAMELESS else f"{name} {value}"


def label(row: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """A row's levels of `names`, or all, in a line; usual ones (_UNSAID) only if there are no others."""
    levels = [(name, row[name]) for name in (row if names is None else names)]
    said = [level for level in levels if level not in _UNSAID.items()]
    return ", ".join(_level(*level)[:48] for level in said or levels) or "all runs"
