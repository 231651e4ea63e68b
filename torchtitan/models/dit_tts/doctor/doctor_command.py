"""`titan-tts data doctor`: reads a whole dataset, says what is wrong and suggests batches."""

import argparse
import os
import re
import sys
import time
from collections import Counter
from typing import Any

from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.doctor.checks import Limits, all_findings, measured_frame_rate
from torchtitan.models.dit_tts.doctor.findings import worst_first
from torchtitan.models.dit_tts.doctor.options import (
    add_dataset_arguments,
    count,
    not_negative_float,
    open_whatever_is_there,
    positive_float,
    positive_int,
    print_json,
    show,
)
from torchtitan.models.dit_tts.doctor.plots import need_matplotlib
from torchtitan.models.dit_tts.doctor.report import check_output, draw_pictures, render, write_page
from torchtitan.models.dit_tts.doctor.scan import READ, Measurements, choose_samples, measure
from torchtitan.models.dit_tts.doctor.shard_records import find_records, record_findings
from torchtitan.models.dit_tts.doctor.suggest_buckets import SPEAKER_PATCH_SIZE, suggest, toml_lines
from torchtitan.models.dit_tts.doctor.summary import shard_table, summarize
from torchtitan.models.dit_tts.doctor.text_report import (
    finding_lines,
    suggestion_lines,
    summary_lines,
)
from torchtitan.models.dit_tts.errors import InputError

EXIT_ERRORS_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser)
    defaults = Limits()
    parser.add_argument("--output", help="HTML page; NAME-doctor.html in this folder by default")
    parser.add_argument(
        "--max-samples", type=count, default=0, help="read an even subset only; 0: all"
    )
    parser.add_argument("--seed", type=count, default=0, help="seed of the subset")
    parser.add_argument(
        "--threads", type=count, default=0, help="threads that read; 0: as many as cores, at most 8"
    )
    parser.add_argument("--max-frames", type=positive_int, default=defaults.max_frames)
    parser.add_argument("--max-text-tokens", type=positive_int, default=defaults.max_text_tokens)
    parser.add_argument("--max-speaker-frames", type=positive_int, default=384)
    parser.add_argument(
        "--text-unit",
        choices=("bytes", "chars"),
        default=defaults.text_unit,
        help="what a token is, as [encoder] model",
    )
    parser.add_argument(
        "--batch-frames",
        type=count,
        default=0,
        help="latent frames in a global batch, for the suggestion; 0: 32 of the longest samples",
    )
    parser.add_argument(
        "--duration-tolerance",
        type=not_negative_float,
        default=defaults.duration_tolerance,
        help="frames by which a length may miss its target_duration, beyond one for rounding",
    )
    parser.add_argument(
        "--outlier-sigmas",
        type=positive_float,
        default=defaults.outlier_sigmas,
        help="robust standard deviations of the logarithm that make an outlier",
    )
    parser.add_argument(
        "--min-chars-per-second", type=not_negative_float, default=0.0, help="absolute limit"
    )
    parser.add_argument(
        "--max-chars-per-second", type=not_negative_float, default=0.0, help="absolute limit"
    )
    parser.add_argument(
        "--examples", type=positive_int, default=defaults.max_examples, help="named a finding"
    )


def run(options: argparse.Namespace) -> int:
    # Whatever would fail at the end fails before hours of reading.
    need_matplotlib()
    if options.max_speaker_frames % SPEAKER_PATCH_SIZE:
        raise InputError(
            f"--max-speaker-frames is {options.max_speaker_frames}; give a multiple of the speaker "
            f"encoder's patch of {SPEAKER_PATCH_SIZE} frames."
        )
    output = check_output(options.output or default_output(options.path))
    limits = Limits(
        frames_per_second=options.frames_per_second,
        max_frames=options.max_frames,
        max_text_tokens=options.max_text_tokens,
        text_unit=options.text_unit,
        duration_tolerance=options.duration_tolerance,
        outlier_sigmas=options.outlier_sigmas,
        min_chars_per_second=options.min_chars_per_second,
        max_chars_per_second=options.max_chars_per_second,
        max_examples=options.examples,
    )
    dataset = open_whatever_is_there(options)
    result, found = examine(dataset, options, limits)
    svgs = draw_pictures(dataset, found, limits, result["suggestion"])
    write_page(output, render(result, svgs))
    result["page"] = str(output)
    if options.json:
        print_json(result)
    else:
        _print_result(result)
    return EXIT_ERRORS_FOUND if result["status"] == "errors" else 0


def default_output(paths: list[str]) -> str:
    """NAME-doctor.html, NAME being the last part of the first path that is no pattern."""
    parts = [part for part in re.split(r"[/\\]+", paths[0].removesuffix(".tar")) if part]
    if set(paths[0]) <= set("./\\"):
        parts = [os.path.basename(os.path.abspath(paths[0]))]
    plain = [part for part in parts if not set(part) & set("*?[]{}:")]
    name = re.sub(r"[^\w.-]+", "_", plain[-1] if plain else "data").strip("_.") or "data"
    return f"{name}-doctor.html"


def examine(
    dataset: Dataset, options: argparse.Namespace, limits: Limits
) -> tuple[dict[str, Any], Measurements]:
    """Everything that the page and the JSON say, and the measurements for the pictures."""
    from tqdm import tqdm

    threads = options.threads or min(8, os.cpu_count() or 1)
    samples = choose_samples(len(dataset), options.max_samples, options.seed)
    with tqdm(total=len(samples), desc="reading", unit=" samples", mininterval=1.0) as bar:
        found = measure(dataset, samples, threads, bar.update)
    records, missing = find_records(dataset.tar_paths)
    everything = len(samples) == len(dataset)
    with_digests = everything and any(record.sha256 for record in records.values())
    with tqdm(
        total=len(records),
        desc="SHA-256",
        unit=" shards",
        mininterval=1.0,
        disable=not with_digests,
    ) as bar:
        shard_findings, states = record_findings(
            records,
            missing,
            threads=threads,
            with_digests=with_digests,
            max_examples=limits.max_examples,
            progress=bar.update,
        )
    findings = worst_first(all_findings(dataset, found, limits, shard_findings))
    suggestion = suggest(
        dataset,
        limits,
        max_speaker_frames=options.max_speaker_frames,
        batch_frames=options.batch_frames,
        seed=options.seed,
    )
    problems = Counter(tar_path for tar_path, _ in dataset.problems)
    shards = shard_table(dataset, limits.frames_per_second, problems)
    for shard in shards:
        shard["record"] = states.get(shard["path"], "none")
    severities = {finding.kind.severity for finding in findings}
    rate = measured_frame_rate(dataset, found, limits.frames_per_second)
    result = {
        "status": (
            "errors"
            if "error" in severities
            else "warnings"
            if "warning" in severities
            else "healthy"
        ),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "summary": summarize(dataset, options.path, options.frames_per_second, options.top),
        "read": {
            "samples": len(samples),
            "samples_sound": int((found.rows["state"] == READ).sum()),
            "frames_per_second_measured": None if rate is None else round(rate, 4),
            "channel_mean": [round(float(value), 5) for value in found.channels.mean],
            "channel_std": [round(float(value), 5) for value in found.channels.std],
            "scope": _scope(everything, with_digests, bool(records)),
        },
        "findings": [finding.as_dict() for finding in findings],
        "suggestion": suggestion,
        "toml": toml_lines(suggestion, options.path) if suggestion else "",
        "shards": shards,
    }
    return result, found


def _scope(everything: bool, with_digests: bool, has_records: bool) -> str:
    """What was not looked at, in words."""
    said = (
        "Every sample was read."
        if everything
        else "An even subset was read; lengths, labels, duplicates of latents and keys, and what "
        "the indexes found cover all samples."
    )
    if with_digests:
        return f"{said} Shards were compared with the SHA-256 in prepare.json."
    if has_records:
        return f"{said} Of prepare.json only the sizes of the shards were compared."
    return f"{said} No prepare.json lists these shards."


def _print_result(result: dict[str, Any]) -> None:
    lines = summary_lines(result["summary"])
    lines += ["", f"{result['status']}: {result['read']['scope']}"]
    lines += finding_lines(result["findings"])
    if result["suggestion"]:
        lines += ["", "Suggestion", *suggestion_lines(result["suggestion"], result["toml"])]
    lines += ["", f"page: {result['page']}"]
    show("\n".join(lines))
    sys.stdout.flush()
