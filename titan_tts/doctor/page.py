"""The page of doctor and inspect: findings and contents of a dataset."""

from typing import Any

from titan_tts.doctor.summary import QUANTILES
from titan_tts.report.page import Details, Kind, Page, Part, Section, Table
from titan_tts.report.words import counted, number, size_text

GENERATOR = "titan-tts data doctor"
_EXAMPLES = 3  # of each finding on a terminal
_OPEN = 6  # findings
_RARE = 60
_KINDS: dict[str, Kind] = {"healthy": "good", "warnings": "warning", "errors": "error"}
_LENGTHS = {
    "frames": "frames",
    "reference_frames": "reference frames",
    "text_chars": "text characters",
    "chars_per_second": "characters per second",
}


def doctor_page(result: dict[str, Any]) -> Page:
    """The page of `examine`'s result."""
    read, summary, findings = result["read"], result["summary"], result["findings"]
    measured = read["frames_per_second_measured"]
    rate = number(measured or summary["frames_per_second"])
    how = "measured" if measured else "assumed"
    found: list[Part] = [_finding(place, each) for place, each in enumerate(findings)]
    about = f"{read['samples']:,} of {counted(summary['samples'], 'sample')} read, {read['valid_samples']:,} of them as written."
    if read["samples"] < summary["samples"]:
        about += " What the indexes tell, such as lengths and labels, is of all."
    return Page(
        ", ".join(summary["path"]),
        [
            Section("Findings", found or ["None: every check passed."]),
            Section("Contents", _contents(summary), on_terminal=False),
        ],
        cards=_cards(summary) | {f"frames per second, {how}": rate},
        badge=result["status"],
        kind=_KINDS[result["status"]],
        about=about,
        data=result,
        generator=GENERATOR,
    )


def inspect_page(summary: dict[str, Any]) -> Page:
    parts = _contents(summary)
    if summary["problems"]:
        count = f"{summary['problems']:,}"
        parts.append(f"problems in the shards: {count}; titan-tts data doctor lists them")
    return Page(", ".join(summary["path"]), parts, _cards(summary), data=summary)


def _cards(summary: dict[str, Any]) -> dict[str, str]:
    return {
        "samples": f"{summary['samples']:,}",
        "hours": number(summary["hours"]),
        "speakers": f"{summary['labels']['speaker']['count']:,}",
        "shards": f"{summary['shards']:,}",
        "size": size_text(summary["bytes"]),
    }


def _finding(place: int, finding: dict[str, Any]) -> Details:
    examples = Table(
        (),
        [(each["where"], each["detail"]) for each in finding["examples"]],
        left=(0, 1),
        on_terminal=_EXAMPLES,
        rest="like these",
        total=finding["count"],
    )
    severity = finding["severity"]
    return Details(
        finding["title"],
        [f"{finding['advice']} ({finding['code']})", examples],
        severity,
        severity,
        f"{finding['count']:,}",
        open=severity == "error" and place < _OPEN,
    )


def _contents(summary: dict[str, Any]) -> list[Part]:
    """All of `summary.summarize`."""
    fps = summary["frames_per_second"]
    references, without = number(summary["reference_hours"]), summary["reference_frames"]["without"]
    characters = f"{summary['characters']:,} different"
    if rare := summary["rare_characters"]:
        listed = [f"{character!r} {count}" for character, count in rare.items()]
        more = f" and {len(rare) - _RARE:,} more" if len(rare) > _RARE else ""
        characters += f"; in few texts: {', '.join(listed[:_RARE])}{more}"
    facts = [
        ("speech", f"{number(summary['hours'])} hours at {fps:g} frames per second"),
        ("references", f"{references} hours, {without:,} samples without"),
        ("arrays", counted(summary["latent_channels"], "channel")),
        ("characters", characters),
        ("fingerprint", summary["fingerprint"]),
    ]
    lengths = []
    for name, title in _LENGTHS.items():
        one = summary[name]
        quantiles = [one["quantiles"].get(str(fraction)) for fraction in QUANTILES]
        lengths.append([title, *map(number, (one["min"], *quantiles, one["max"], one["mean"]))])
    head = ("lengths", "min", *(f"{100 * part:g} %" for part in QUANTILES), "max", "mean")
    return [
        Table((), facts, left=(0, 1)),
        Table(head, lengths),
        *(_label(name, label) for name, label in summary["labels"].items()),
    ]


def _label(name: str, label: dict[str, Any]) -> Table:
    without = f", {label['without']:,} samples without" if label["without"] else ""
    head = (f"{name}: {label['count']:,} different{without}", "samples", "hours", "fraction")
    rows = [
        (each["value"], f"{each['samples']:,}", number(each["hours"]), f"{each['fraction']:.2%}")
        for each in label["most"]
    ]
    return Table(head, rows, on_terminal=10**6, rest="(--top lists more)", total=label["count"])
