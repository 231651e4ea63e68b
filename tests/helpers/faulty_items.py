"""Items of the GPU check that end in every way; without torch, so that their processes start fast."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from tools.gpu_check.supervisor import Item, NotMeasured

OUTCOMES = {
    "good": {"tflops": 1.5},
    "dies": "die",
    "raises": ValueError("no such thing"),
    "too large": MemoryError("2 GiB more"),
    "absent": NotMeasured("not in this version"),
    "over its bar": {"error": 2.0, "passed": False, "why": "2 is over 1"},
    "within its bar": {"error": 0.5, "passed": True},
    "never ends": "stay",
    "behind it": {},
}
LAST = "within its bar"


def measured(order: Path, name: str, then, turn) -> dict:
    """Says when its turn begins and ends; were two at once, one would say so between the other's."""
    while then == "stay" and f"{LAST} ends" not in order.read_text():
        time.sleep(0.05)  # whichever is ready first has the turn: it is never ready before LAST
    turn()
    with order.open("a") as file:
        print(name, "begins", file=file, flush=True)
        time.sleep(0.1)
        print(name, "ends", file=file, flush=True)
    if isinstance(then, Exception):
        raise then
    if isinstance(then, dict):
        return then
    time.sleep(1e6) if then == "stay" else os.kill(os.getpid(), signal.SIGKILL)


def faulty_items(order: Path) -> list[Item]:
    return [
        Item(name, partial(measured, order, name, then), 4.0) for name, then in OUTCOMES.items()
    ]
