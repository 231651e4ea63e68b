"""`titan-tts autotune`: the fastest layout and the largest micro-batch of every bucket, by real steps."""

from pathlib import Path

from titan_tts.grids.options import Options
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import check_range, quiet_known_warnings, require
from torchtitan.models.dit_tts.files import check_writable, local_path, write_atomic


def run(options: Options) -> int:
    """Searches, prints the keys, and writes them to `--out`. Returns the exit status."""
    check_range("--nproc", options.nproc, 1, 10**6)
    check_range("--timeout-minutes", options.timeout_minutes, 0.1, 10**6)
    path = find_config(options.config)
    same = options.out.resolve() == path.resolve()
    require(not same, f"--out = {options.out} is the config, which it would replace; give another")
    from titan_tts.grids.autotune import Autotune
    from titan_tts.launch.supervisor import interrupt_on_signals
    from torchtitan.models.dit_tts.config.manager import load_config

    quiet_known_warnings()
    check_writable(options.out, "--out")
    config = load_config([f"--job.config_file={path}", *options.config_args])
    work = Path(local_path(options.work or f"outputs/autotune/{path.stem}"))
    check_writable(work / "trials", "--work")
    interrupt_on_signals()
    found = Autotune(config, options, work / "trials").run()
    write_atomic(options.out, found.toml())
    print(found.toml(), end="")
    print(f"written to {options.out}; put these keys into your config")
    return 0
