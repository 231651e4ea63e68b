"""benchmarks/after_a_save.py: what it counts."""

import os
import threading
import time

from benchmarks.after_a_save import context_switches


def test_a_thread_that_ends_keeps_its_count():
    waits, counted, counts = 20, threading.Event(), {}

    def wait() -> None:
        for _ in range(waits):
            time.sleep(0.0005)
        counted.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    before = 0
    while counts.get(str(thread.native_id), 0) < waits:
        before = context_switches(os.getpid(), counts)
    counted.set()
    thread.join()
    assert context_switches(os.getpid(), counts) >= before >= waits
