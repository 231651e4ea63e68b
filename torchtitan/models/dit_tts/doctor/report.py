"""The doctor's HTML page: one file with its styles and pictures inside, opened by any browser."""

import os
from pathlib import Path
from typing import Any

from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.doctor import plots as pictures
from torchtitan.models.dit_tts.doctor.checks import Limits, characters_per_second
from torchtitan.models.dit_tts.doctor.scan import Measurements
from torchtitan.models.dit_tts.doctor.summary import hours_by_label
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file

GENERATOR = "titan-tts data doctor"
_TEMPLATE = "doctor.html.jinja"
_HEAD_BYTES = 1024
# A table of more rows helps nobody, and browsers are slow with it.
MOST_SHARDS = 500


def check_output(path: str) -> Path:
    """The page's path, once it is known that it can be written and replaces nothing else.

    Raises:
        InputError: a folder, a file that is not a page of the doctor, or no folder to write to.
    """
    output = Path(path).expanduser().absolute()
    if output.is_dir():
        raise InputError(f"--output {path} is a folder; give the name of an .html file.")
    if not output.parent.is_dir():
        raise InputError(f"--output {path} lies in a folder that does not exist; make it first.")
    if output.exists():
        try:
            with open(output, "rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise InputError(
                f"--output {path} is there and cannot be read ({error.strerror}); give another "
                "name."
            ) from None
        if f'content="{GENERATOR}"'.encode() not in head:
            raise InputError(
                f"--output {path} is there and is no page of the doctor, so it is not overwritten; "
                "give another name."
            )
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"--output {path} lies in a folder that cannot be written; give another.")
    return output


def draw_pictures(
    dataset: Dataset,
    found: Measurements,
    limits: Limits,
    suggestion: dict[str, Any] | None,
) -> list[tuple[str, str]]:
    """(what it shows, SVG) of every picture of the page; none of an empty dataset."""
    if not len(dataset):
        return []
    rate = characters_per_second(dataset, limits.frames_per_second)
    edges = suggestion["bucket_frames"] if suggestion else []
    drawn = [
        pictures.frames_picture(dataset.frames, limits.frames_per_second, edges),
        pictures.text_picture(dataset.text_chars, dataset.text_bytes),
        pictures.speech_rate_picture(rate[rate > 0]),
    ]
    if suggestion:
        drawn.append(pictures.waste_picture(suggestion))
    if found.channels.frames:
        drawn.append(pictures.channels_picture(found.channels.mean, found.channels.std))
    svgs = [(paint.__name__.replace("_", " "), pictures.draw(paint)) for paint in drawn]
    values, _, hours = hours_by_label(dataset, "speaker", limits.frames_per_second)
    if values:
        height = 0.9 + 0.19 * min(len(values), pictures.MOST_SPEAKERS)
        paint = pictures.speakers_picture(values, hours)
        svgs.append(("speaker bars", pictures.draw(paint, size=(6.4, max(height, 1.6)))))
    return svgs


def render(result: dict[str, Any], svgs: list[tuple[str, str]]) -> str:
    """The page of a doctor's result (docs/inspection.md has its keys)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"thousands": thousands, "size": size_text, "short": short_number}
    return environment.get_template(_TEMPLATE).render(
        generator=GENERATOR,
        shown_shards=_faulty_first(result["shards"])[:MOST_SHARDS],
        pictures=[{"name": name, "svg": Markup(svg)} for name, svg in svgs],
        **result,
    )


def _faulty_first(shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(shards, key=lambda one: (one["problems"] == 0, one["record"] != "differs"))


def write_page(output: Path, page: str) -> None:
    """Replace the page at once."""
    with atomic_file(output) as file:
        file.write(page.encode("utf-8", "backslashreplace"))


def thousands(value: float | None) -> str:
    """1234567 -> "1,234,567"; None -> a dash."""
    return "-" if value is None else f"{value:,}"


def short_number(value: float | None) -> str:
    """Whole numbers in full, others with four significant digits; None -> a dash."""
    if value is None:
        return "-"
    whole = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def size_text(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of 1 or more."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError
