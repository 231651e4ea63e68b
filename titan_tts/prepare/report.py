"""A preparation's outcome: figures for prepare.json, and in words."""

from typing import Any

from titan_tts.prepare.encode import Chunk
from titan_tts.prepare.listing import SHOWN_PROBLEMS
from titan_tts.prepare.processing import REASONS
from titan_tts.records.utterance import SPLITS
from torchtitan.models.dit_tts.data.left_out import left_out_words
from torchtitan.models.dit_tts.errors import without_secrets

_SHOWN_NAMES = 5  # of the recordings that are left out for a reason


def summarize(
    shards: dict[str, dict[str, Any]], frames_per_second: float, speakers: int, total: Chunk
) -> dict[str, Any]:
    """The figures of a preparation; the same whatever workers, kills and engine."""
    summary: dict[str, Any] = {}
    for split in SPLITS:
        parts = [shard for name, shard in shards.items() if name.startswith(f"{split}/")]
        sums = {
            name: sum(shard[name] for shard in parts)
            for name in ("samples", "frames", "without_reference")
        }
        hours = round(sums["frames"] / frames_per_second / 3600, 4)
        summary[split] = {**sums, "hours": hours, "shards": len(parts)}
    seconds = {name: round(each, 1) for name, each in sorted(total.dropped_seconds.items())}
    return summary | {
        "speakers": speakers,
        "dropped": dict(sorted(total.dropped.items())),
        "dropped_seconds": seconds,
        "dropped_names": total.dropped_names,
        "problems": total.problems[:SHOWN_PROBLEMS],
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary in words."""
    out = []
    for split in SPLITS:
        part = summary[split]
        if part["samples"]:
            hours = part["hours"]
            length = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
            out.append(f"{split}: samples {part['samples']}, {length}, shards {part['shards']}")
        if count := part["without_reference"]:
            why = "as --references is 0 or their speaker has no other recording"
            out.append(
                f"{split} samples without a reference, {why}: {count} ({count / part['samples']:.1%})"
            )
    out.append(f"speakers: {summary['speakers']}")
    samples = sum(summary[split]["samples"] for split in SPLITS)
    if total := sum(summary["dropped"].values()):
        seconds = summary.get("dropped_seconds", {})  # not in records of earlier versions
        lost = sum(seconds.values())
        everything = lost + 3600 * sum(summary[split]["hours"] for split in SPLITS)
        out.append(left_out_words("recordings", (total, samples + total), (lost, everything), ()))
        for name, count in summary["dropped"].items():
            minutes = f", {seconds[name] / 60:.1f} minutes" if seconds.get(name) else ""
            names = summary.get("dropped_names", {}).get(name, [])[:_SHOWN_NAMES]
            shown = f": {', '.join(names)}{', ...' if count > len(names) else ''}" if names else ""
            out.append(without_secrets(f"  {name}: {count}{minutes} ({REASONS[name]}){shown}"))
    if summary["problems"]:
        out.append("the first corrupt recordings:")
        out += [without_secrets(f"  {key}: {sentence}") for key, sentence in summary["problems"]]
    return out
