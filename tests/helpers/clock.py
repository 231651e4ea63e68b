"""A clock that stands still until a test sets it."""


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter
