"""`titan-tts ablate`: runs a grid of benchmarks, and continues one that was ended."""

from dataclasses import dataclass

import tyro

from torchtitan.models.dit_tts.errors import InputError, quiet_known_warnings, require_modules
from torchtitan.models.dit_tts.files import check_writable


@dataclass
class Options:
    """Run a grid of benchmarks.

    The same command continues a grid that was ended. Several commands, as of a SLURM array, share a grid
    between them.
    """

    grid: tyro.conf.Positional[str]
    """TOML file of the grid, or the name of a shipped one: table, 800m, 8b, autotune, debug."""

    dry_run: bool = False
    """List the runs with the plan's forecasts if the GPU is known, the fastest, and hours; start none."""

    gpu: str = ""
    """Name of the GPU for the forecasts, as in `titan-tts plan`; overrides the grid's."""

    retry: str = ""
    """States whose runs are repeated, separated by commas: oom, failed, timeout, skipped."""

    run_what_cannot_fit: bool = False
    """Also start runs that do not fit according to the plan."""

    no_analysis: bool = False
    """Do not write the analysis of the grid at its end."""


def run(options: Options) -> int:
    """Runs what is left of a grid. Returns the exit status: 1 where a run has failed or timed out."""
    from titan_tts.grids.grid_file import read_grid
    from torchtitan.models.dit_tts.config.shipped import find_config

    path = find_config(options.grid, "ablations", "grid")
    grid = read_grid(path)
    grid.grid.gpu = options.gpu or grid.grid.gpu
    # torch takes seconds to import.
    from titan_tts.grids.grid_run import FINAL, GridRun
    from titan_tts.launch.supervisor import interrupt_on_signals

    quiet_known_warnings()
    if not (options.no_analysis or options.dry_run):
        require_modules("matplotlib")  # before hours of work
    retried = {state for state in options.retry.split(",") if state}
    if retried - set(FINAL):
        raise InputError(f"--retry {options.retry}, but allowed are {', '.join(FINAL)}")
    grid_run = GridRun(grid, retried, options.run_what_cannot_fit)
    if options.dry_run:
        for line in grid_run.list():
            print(line, flush=True)
        return 0
    check_writable(grid_run.folder / "grid.toml", "[grid] dump_folder")
    interrupt_on_signals()
    status = grid_run.run(path.read_text())
    if not options.no_analysis:
        from titan_tts.grids import analyze_command

        analyze_command.run(analyze_command.Options([str(grid_run.folder)]))
    return status
