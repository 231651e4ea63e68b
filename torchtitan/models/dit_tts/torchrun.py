"""torchrun, but a failed rank's own words are the last thing printed, without torchrun's traceback."""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def launch(args: list[str]) -> int:
    """Runs torchrun with its own arguments. Returns the first failed rank's exit status, or 0."""
    try:
        torchrun(args)
    except SignalException as error:
        print(f"error: {error}", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank that a signal ended has a negative status; shells call that 128 + signal.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
