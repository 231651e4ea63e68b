"""torchrun, but every signal goes to the ranks, which end the run by themselves, and a failed rank's own
words are the last thing printed, without torchrun's traceback."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


def _children() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(folder.name))
    return found


def _pass_on(number: int, frame: FrameType | None) -> None:
    for child in _children():
        with suppress(ProcessLookupError):
            os.kill(child, number)


def launch(args: list[str]) -> int:
    """Runs torchrun with its own arguments. Returns the first failed rank's exit status, or 0."""
    # Its own handling of signals ends the ranks after 30 seconds, saved or not, and leaves them behind
    # at a signal that it does not know. It must be given one: this is sent by nobody.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGRTMAX"
    before = {each: signal.signal(each, _pass_on) for each in _PASSED_ON}
    try:
        torchrun(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank that a signal ended has a negative status; shells call that 128 + signal.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
