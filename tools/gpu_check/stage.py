"""The process of one stage: python -m tools.gpu_check.stage NAME SETTINGS LINES

Runs the stage's items that LINES has no row of yet. Ends with status AGAIN where the device no
longer answers after an error: the items behind it then get a process of their own.
"""

import importlib
import sys
import time
import traceback
from pathlib import Path

from tools.gpu_check.items import (
    AGAIN,
    FAILED,
    MEASURED,
    NOT_MEASURED,
    OOM,
    PASSED,
    Item,
    NotMeasured,
    Row,
    is_out_of_memory,
    read_stage,
    write_line,
    write_row,
)
from tools.gpu_check.settings import read_settings


def measure(item: Item, deadline: float) -> Row:
    """Runs one item; whatever it raises is its result."""
    left = deadline - time.time()
    if left < item.seconds:
        why = "time: the stage's time was over"
        if left > 0:
            why = f"time: it takes {item.seconds:.0f} s and the stage had {left:.0f} s left"
        return Row(item.name, NOT_MEASURED, why=why)
    began = time.perf_counter()
    values, why = {}, ""
    try:
        values = item.measure()
        status = MEASURED
        if "passed" in values:
            status = PASSED if values.pop("passed") else FAILED
            said = values.pop("why", "")
            why = said if status == FAILED else ""
    except NotMeasured as reason:
        status, why = NOT_MEASURED, str(reason)
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        status = OOM if is_out_of_memory(error) else FAILED
    return Row(item.name, status, time.perf_counter() - began, values, why)


def device_answers() -> bool:
    """False after an error that the device does not recover from within this process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main(name: str, settings_file: str, lines_file: str) -> int:
    settings, lines = read_settings(Path(settings_file)), Path(lines_file)
    items = importlib.import_module(f"tools.gpu_check.{name}").items(settings)
    names, done = read_stage(lines)
    if names is None:
        write_line(lines, {"items": [item.name for item in items]})
    known = {row.item for row in done}
    for item in items:
        if item.name in known:
            continue
        row = measure(item, settings.deadline)
        write_row(lines, row)
        if row.status not in (MEASURED, PASSED) and not device_answers():
            return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
