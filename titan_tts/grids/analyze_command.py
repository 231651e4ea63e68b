"""`titan-tts analyze`: what makes runs fast, as tables, plots and one HTML page."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from titan_tts.report.page import check_page
from titan_tts.report.words import counted
from torchtitan.models.dit_tts.errors import require_modules, show
from torchtitan.models.dit_tts.files import write_atomic

if TYPE_CHECKING:
    from titan_tts.grids.runs import Run

GENERATOR = "titan-tts analyze"
PAGE = "index.html"


@dataclass
class Options:
    """Compare runs: effects of each factor on speed and memory, best configurations, scaling. Writes
    index.html, summary.csv, summary.json and the plots."""

    runs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS [RUNS ...]")]
    """Folders of runs: of a grid, of one run, or any folder above them."""

    out: str = ""
    """Folder for the results; `analysis` in the first folder by default."""


def run(options: Options) -> int:
    require_modules("matplotlib")
    out = Path(options.out or Path(options.runs[0]) / "analysis").expanduser().absolute()
    check_page(out / PAGE, "--out", GENERATOR)
    from titan_tts.grids.page import analysis_page
    from titan_tts.grids.plots import draw_all
    from titan_tts.grids.runs import find_runs

    content = analyse(find_runs(options.runs))
    plots = draw_all(content)
    page = analysis_page(GENERATOR, content, plots)
    _write(out, content, plots)
    write_atomic(out / "summary.json", page.json() + "\n")
    page.write(out / PAGE)
    show(f"{page.text()}\n")
    states = ", ".join(f"{count} {state}" for state, count in content["states"].items())
    show(f"{counted(len(content['all']), 'run')} ({states}): {out / PAGE}")
    return 0


def analyse(runs: Sequence["Run"]) -> dict[str, Any]:
    """All that the page, the plots and summary.json show. `rows`: those that statistics use; `names`: what varies."""
    from titan_tts.grids import effects
    from titan_tts.grids.runs import COMPARED, extra_axes

    axes = extra_axes(runs)
    factors = [*COMPARED, *axes]
    rows = [run.row(axes) for run in runs if run.measured]
    names = effects.varying(rows, factors)
    speed = effects.SPEED
    memory = "peak_reserved_gib"  # what must fit
    figures = (speed, "audio_seconds_per_second", "seconds_per_step", "mfu", "goodput_mfu", "hfu")
    return {
        "all": [run.row(axes) for run in runs],
        "states": dict(Counter(run.state for run in runs).most_common()),
        "rows": rows,
        "names": names,
        "constant": {name: rows[0][name] for name in factors if rows and name not in names},
        "deviation": effects.repeat_deviation(effects.cells_of(rows, names, speed)),
        "effects": {name: effects.effects(rows, names, name) for name in (speed, memory)},
        "growth": effects.growth(rows, names),
        "best": effects.best(rows, names, (*figures, memory)),
        "scaling": effects.scaling(rows, names),
    }


def _write(out: Path, content: dict[str, Any], plots: dict[str, dict[str, Any]]) -> None:
    """Writes summary.csv and the plots, and removes an earlier analysis's plots."""
    from titan_tts.grids.plots import PLOTS

    table = io.StringIO()
    writer = csv.DictWriter(table, content["all"][0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(content["all"])
    write_atomic(out / "summary.csv", table.getvalue().encode("utf-8", "backslashreplace"))
    for name in PLOTS:
        for kind in ("svg", "png"):
            path = out / "plots" / f"{name}.{kind}"
            if name in plots:
                write_atomic(path, plots[name][kind])
            else:
                path.unlink(missing_ok=True)
