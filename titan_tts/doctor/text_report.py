"""A dataset's summary and findings as lines for a terminal, and numbers as people read them."""

import json
import re
from collections.abc import Sequence
from typing import Any

from titan_tts.doctor.summary import QUANTILES
from titan_tts.tables import aligned, number
from torchtitan.models.dit_tts.errors import show

_BAR_CELLS = 40
_EXAMPLES = 3
_RARE = 60
LENGTHS = {
    "frames": "frames",
    "reference_frames": "reference frames",
    "text_chars": "text characters",
    "text_bytes": "text bytes",
    "chars_per_second": "characters per second",
}


def show_json(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1)
    show(re.sub("[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text))


def size_text(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of 1 or more."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """All of `summary.summarize`."""
    fps = summary["frames_per_second"]
    dtypes = ", ".join(f"{name} in {n:,} samples" for name, n in summary["dtype"].items())
    facts = {
        "samples": f"{summary['samples']:,} in {summary['shards']} shards",
        "speech": f"{number(summary['hours'])} hours at {fps:g} frames per second",
        "references": f"{number(summary['reference_hours'])} hours",
        "size": size_text(summary["bytes"]),
        "arrays": f"{summary['latent_channels']} channels, {dtypes}",
        "characters": f"{summary['characters']:,} different",
        "fingerprint": summary["fingerprint"],
    }
    if rare := summary["rare_characters"]:
        listed = [f"{character!r} {count}" for character, count in rare.items()]
        more = f" and {len(rare) - _RARE:,} more" if len(rare) > _RARE else ""
        facts["characters"] += f"; in few texts: {', '.join(listed[:_RARE])}{more}"
    lines = [", ".join(summary["path"]), *(f"  {name:13}{text}" for name, text in facts.items())]
    if len(summary["sources"]) > 1:
        rows = [["source", "samples", "hours"]]
        for one in summary["sources"]:
            rows.append([one["path"], f"{one['samples']:,}", number(one["hours"])])
        lines += ["", *_table(rows)]
    rows = [["", "min", *(f"{100 * fraction:g} %" for fraction in QUANTILES), "max", "mean"]]
    for name, title in LENGTHS.items():
        one = summary[name]
        quantiles = [one["quantiles"].get(str(fraction)) for fraction in QUANTILES]
        rows.append([title, *map(number, (one["min"], *quantiles, one["max"], one["mean"]))])
    lines += ["", *_table(rows), "", *_histogram(summary["frames"]["histogram"], fps)]
    for name, label in summary["labels"].items():
        lines += _label_lines(name, label)
    if summary["problems"]:
        count = f"{summary['problems']:,}"
        lines += ["", f"  problems in the shards: {count}; titan-tts data doctor lists them"]
    return lines


def _histogram(histogram: dict[str, list], frames_per_second: float) -> list[str]:
    counts, edges = histogram["counts"], [edge / frames_per_second for edge in histogram["edges"]]
    digits = 1 if len(edges) > 1 and edges[1] >= 0.5 else 2
    rows = []
    for low, high, samples in zip(edges, edges[1:], counts):
        bar = ("#" * -(-samples * _BAR_CELLS // max(counts))).ljust(_BAR_CELLS)
        rows.append([f"{low:.{digits}f} - {high:.{digits}f} s", f"{samples:,}", bar])
    return _table(rows) if rows else []


def _label_lines(name: str, label: dict[str, Any]) -> list[str]:
    if not label["count"]:
        return []
    without = f", {label['without']:,} samples without" if label["without"] else ""
    title = f"{name}: {label['count']:,} different{without}"
    rows = [[title, "samples", "hours", "fraction"]]
    for one in label["most"]:
        figures = f"{one['samples']:,}", number(one["hours"])
        rows.append([f"  {one['value']}", *figures, f"{100 * one['fraction']:.2f} %"])
    if (more := label["count"] - len(label["most"])) > 0:
        rows.append([f"  ... {more:,} more", "", "", ""])
    return ["", *_table(rows)]


def report_lines(result: dict[str, Any]) -> list[str]:
    """The doctor's result: summary, findings with a few examples each, and the suggestion."""
    lines = summary_lines(result["summary"])
    lines += ["", f"{result['status']}: {result['read']['scope']}"]
    lines += [] if result["findings"] else ["  no findings: every check passed"]
    for finding in result["findings"]:
        count = f"{finding['count']:,}"
        lines.append(f"  {finding['severity']:8}{count:>9}  {finding['title']}")
        lines.append(f"{'':21}{finding['advice']}")
        for example in finding["examples"][:_EXAMPLES]:
            lines.append(f"{'':21}{example['where']}: {example['detail']}")
    lines += ["", "Suggestion", *suggestion_lines(result["suggestion"])]
    return [*lines, "", f"page: {result['page']}"]


def suggestion_lines(suggestion: dict[str, Any] | None) -> list[str]:
    """All of `suggest_buckets.suggest`."""
    if suggestion is None:
        return ["  none: no training sample is within the limits"]
    paths = suggestion["paths"]
    lines = [
        f"  training samples within the limits: {suggestion['samples']:,}; over them: "
        f"{suggestion['left_out']:,}",
        f"  for training: {', '.join(paths['training'])}",
    ]
    lines += [f"  {words}"] if (words := suggestion["left_out_words"]) else []
    if paths["held_out"]:
        held_out = f"{suggestion['held_out']:,}"
        lines.append(f"  held out, {held_out} samples: {', '.join(paths['held_out'])}")
    rows = [["buckets", "padding"]]
    for one in suggestion["choices"]:
        mark = " (suggested)" if one["buckets"] == suggestion["num_buckets"] else ""
        rows.append([f"{one['buckets']}{mark}", f"{100 - 100 * one['useful_fraction']:.1f} %"])
    toml = (f"  {line}".rstrip() for line in suggestion["toml"].split("\n"))
    others = (
        f"  with these, {suggestion['text_padding_fraction']:.1%} of the text tokens and "
        f"{suggestion['reference_padding_fraction']:.1%} of the reference frames are padding"
    )
    lines += [*_table(rows), others, ""]
    lines += ["  In the config, in its one table of [data]:", *toml]
    return [*lines, "", "  or as options:", f"  {suggestion['command_line']}"]
