"""The process of one item: python -m tools.gpu_check.worker SETTINGS NUMBER

It builds, compiles and warms up while the others run, says that it is ready, and waits for its turn. Its row goes to
NUMBER.json.
"""

import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from tools.gpu_check import items
from tools.gpu_check.catalog import catalog
from tools.gpu_check.items import NotMeasured, Row, Settings
from torchtitan.models.dit_tts.errors import failure_state
from torchtitan.models.dit_tts.files import write_atomic


def main(given: str, number: str) -> None:
    settings = Settings(**json.loads(given))
    place = Path(settings.work, "rows", number)
    item = catalog(settings)[int(number)]
    row = Row(item.name, items.MEASURED)

    def turn() -> None:
        place.with_suffix(".ready").touch()
        while not place.with_suffix(".turn").exists():
            time.sleep(0.02)
        row.began = time.time()

    try:
        row.values = item.measure(turn)
        if "passed" in row.values:
            row.status = items.PASSED if row.values["passed"] else items.FAILED
            row.why = row.values.pop("why", "")
    except NotMeasured as error:
        row.status, row.why = items.NOT_MEASURED, str(error)
    except Exception as error:
        traceback.print_exc()
        by_name = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
        row.status = items.OOM if by_name or failure_state(error) == "oom" else items.FAILED
        row.why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    row.seconds = time.time() - row.began if row.began else 0.0
    write_atomic(place.with_suffix(".json"), json.dumps(asdict(row)))


if __name__ == "__main__":
    main(*sys.argv[1:])
