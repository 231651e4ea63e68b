"""A dataset's summary and findings as lines for a terminal."""

from collections.abc import Sequence
from typing import Any

from torchtitan.models.dit_tts.doctor.report import short_number, size_text, thousands
from torchtitan.models.dit_tts.doctor.summary import QUANTILES

_BAR_CELLS = 40
_EXAMPLES = 3
_LENGTHS = (
    ("frames", "frames"),
    ("reference frames", "reference_frames"),
    ("text characters", "text_chars"),
    ("text bytes", "text_bytes"),
    ("characters a second", "chars_per_second"),
)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text in columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """All of ``summary.summarize``."""
    dtypes = ", ".join(
        name if len(summary["dtype"]) == 1 else f"{name} in {thousands(samples)} samples"
        for name, samples in summary["dtype"].items()
    )
    fps = summary["frames_per_second"]
    lines = [
        ", ".join(summary["path"]),
        *(
            f"  {name:13}{value}"
            for name, value in (
                ("samples", f"{thousands(summary['samples'])} in {summary['shards']} shards"),
                ("speech", f"{short_number(summary['hours'])} hours at {fps:g} frames a second"),
                ("references", f"{short_number(summary['reference_hours'])} hours"),
                ("size", size_text(summary["bytes"])),
                ("arrays", f"{dtypes}, {summary['latent_channels']} channels"),
                ("characters", f"{thousands(summary['characters']['count'])} different"),
                ("fingerprint", summary["fingerprint"]),
            )
        ),
    ]
    if len(summary["sources"]) > 1:
        rows = [["source", "samples", "hours"]]
        rows += [
            [one["path"], thousands(one["samples"]), short_number(one["hours"])]
            for one in summary["sources"]
        ]
        lines += ["", *table(rows)]
    rows = [["", "min", *(f"{100 * share:g} %" for share in QUANTILES), "max", "mean"]]
    for title, name in _LENGTHS:
        one = summary[name]
        quantiles = [short_number(one["quantiles"].get(str(share))) for share in QUANTILES]
        rows.append(
            [
                title,
                short_number(one["min"]),
                *quantiles,
                short_number(one["max"]),
                short_number(one["mean"]),
            ]
        )
    lines += ["", *table(rows), "", *_histogram(summary["frames"]["histogram"], fps)]
    for name, label in summary["labels"].items():
        lines += _label_lines(name, label)
    if summary["problems"]:
        lines += [
            "",
            f"  problems in the shards: {thousands(summary['problems'])}; titan-tts data doctor "
            "names them",
        ]
    return lines


def finding_lines(findings: Sequence[dict[str, Any]]) -> list[str]:
    """A line a finding (as ``Finding.as_dict``), and a few examples below it."""
    if not findings:
        return ["  no findings: every check passed"]
    lines = []
    for finding in findings:
        severity, cases = finding["severity"], thousands(finding["count"])
        lines.append(f"  {severity:8}{cases:>9}  {finding['title']}")
        lines += [
            f"{'':21}{example['where']}: {example['detail']}"
            for example in finding["examples"][:_EXAMPLES]
        ]
    return lines


def suggestion_lines(suggestion: dict[str, Any], toml: str) -> list[str]:
    """Padding by number of buckets, and the TOML to paste."""

    def percent(one: dict[str, Any]) -> str:
        return f"{100 - 100 * one['useful_fraction']:.1f} %"

    rows = [["buckets", "padding", "shapes"]]
    for one in suggestion["choices"]:
        mark = " (suggested)" if one["buckets"] == suggestion["num_buckets"] else ""
        rows.append([f"{one['buckets']}{mark}", percent(one), str(one["shapes"])])
    batch = suggestion["pad_to_batch_max"]
    rows.append(["padded to the longest of all", percent(suggestion["pad_to_max"]), "1"])
    rows.append([f"random batches of {batch['batch_size']}", percent(batch), str(batch["shapes"])])
    return [*table(rows), "", *(f"  {line}".rstrip() for line in toml.split("\n"))]


def _histogram(histogram: dict[str, list], frames_per_second: float) -> list[str]:
    counts, edges = histogram["counts"], histogram["edges"]
    most = max(counts, default=0)
    digits = 1 if len(edges) > 1 and edges[1] / frames_per_second >= 0.5 else 2
    rows = [
        [
            f"{low / frames_per_second:.{digits}f} - {high / frames_per_second:.{digits}f} s",
            thousands(samples),
            ("#" * -(-samples * _BAR_CELLS // most)).ljust(_BAR_CELLS),
        ]
        for low, high, samples in zip(edges, edges[1:], counts)
    ]
    return table(rows) if rows else []


def _label_lines(name: str, label: dict[str, Any]) -> list[str]:
    if not label["count"]:
        return []
    without = f", {thousands(label['without'])} samples without" if label["without"] else ""
    values = "value" if label["count"] == 1 else "values"
    rows = [[f"{name}: {thousands(label['count'])} {values}{without}", "samples", "hours", "share"]]

    def row(one: dict[str, Any]) -> list[str]:
        share = f"{100 * one['share']:.2f} %"
        return [f"  {one['value']}", thousands(one["samples"]), short_number(one["hours"]), share]

    rows += [row(one) for one in label["most"]]
    left = label["count"] - len(label["most"]) - len(label["least"])
    if left > 0:
        rows.append([f"  ... {thousands(left)} more", "", "", ""])
    rows += [row(one) for one in reversed(label["least"])]
    return ["", *table(rows)]
