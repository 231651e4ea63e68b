"""What `inspect` and `doctor` share: their options, opening a dataset, and plain printing."""

import argparse
import json
import math
import sys
from typing import Any

from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def not_negative_float(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="+",
        help="as [data] path: folder, .tar, glob, pattern with braces or URL; several are one "
        "dataset",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--frames-per-second", type=positive_float, default=25.0, help="latent frames a second"
    )
    parser.add_argument(
        "--latent-channels", type=positive_int, default=128, help="width of a latent frame"
    )
    parser.add_argument(
        "--top", type=positive_int, default=10, help="speakers (languages ...) listed at either end"
    )


def open_whatever_is_there(options: argparse.Namespace) -> Dataset:
    """The dataset with its sound samples, however many are damaged.

    Raises:
        InputError: nothing is there, or arrays of another width.
    """
    return open_dataset(options.path, options.latent_channels, on_error="report")


def print_json(value: dict[str, Any]) -> None:
    show(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1))


def show(text: str) -> None:
    """Print, with escapes for what the terminal's encoding lacks: texts have all scripts."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
