"""Before torch is loaded: every test computes on the CPU, for which its bars are, in one thread, and
nothing is read from or left in the user's cache folders."""

import logging
import os
import tempfile
from collections import Counter

_caches = tempfile.TemporaryDirectory(prefix="titan-tts-tests-")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["XDG_CACHE_HOME"] = _caches.name
os.environ["HF_HOME"] = f"{_caches.name}/huggingface"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, which torch does, too
# A thread that outlives its test logs to a stream that is closed. Python 3.11 would print the traceback with
# `ast.parse`, which breaks off another thread's that runs at the same time (CPython issue 106905).
logging.raiseExceptions = False
os.fsync = lambda descriptor: (
    None
)  # no test ends the machine, and a disk takes milliseconds for each


def pytest_collection_modifyitems(items):
    """The files that take long come first: at the end no process waits for the other."""
    long = Counter(item.path for item in items if item.get_closest_marker("long"))
    items.sort(
        key=lambda item: ("integration_tests" not in item.path.parts, -long[item.path], item.path)
    )
