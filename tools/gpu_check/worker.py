"""The process of one item: python -m tools.gpu_check.worker SETTINGS NUMBER

It builds, compiles and warms up beside the others, says that it is ready, and waits for its turn. Its row goes to
rows/NUMBER.json.
"""

import fcntl
import json
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tools.gpu_check.items import FAILED, MEASURED, NOT_MEASURED, OOM, PASSED, NotMeasured, Row
from tools.gpu_check.settings import read_settings


def main(settings_file: str, number: str) -> None:
    from tools.gpu_check.catalog import catalog
    from torchtitan.models.dit_tts.errors import failure_state
    from torchtitan.models.dit_tts.files import write_atomic

    settings = read_settings(Path(settings_file))
    rows = settings.folder / "rows"
    if number == "list":
        listed = [[item.group, item.name, item.gib] for item in catalog(settings)]
        write_atomic(rows / "list.json", json.dumps(listed))
        return
    item = catalog(settings)[int(number)]
    row = Row(item.name, MEASURED)
    lock = (settings.folder / "device.lock").open("w")

    def turn() -> None:
        (rows / f"{number}.ready").touch()
        while not (rows / f"{number}.turn").exists():
            time.sleep(0.02)
        fcntl.flock(lock, fcntl.LOCK_EX)
        row.began = time.time()

    try:
        row.values = item.measure(turn)
        if "passed" in row.values:
            row.why = "" if row.values["passed"] else row.values.pop("why", "")
            row.status = PASSED if row.values["passed"] else FAILED
    except NotMeasured as error:
        row.status, row.why = NOT_MEASURED, str(error)
    except Exception as error:
        traceback.print_exc()
        by_name = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
        is_oom = by_name or failure_state(error) == "oom"
        row.status = OOM if is_oom else FAILED
        row.why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    row.seconds = time.time() - row.began if row.began else 0.0
    write_atomic(rows / f"{number}.json", json.dumps(asdict(row)))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
