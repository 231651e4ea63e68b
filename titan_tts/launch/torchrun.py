"""torchrun, but signals go to the ranks, which end the run themselves, and a failed rank's own error is printed
last, without torchrun's traceback.

torchrun itself ends the ranks 30 seconds after a signal, saved or not, and leaves them behind at a signal that it
does not know. So it runs in a process and session of its own, which a terminal's signals do not reach, and leaves
others, such as SLURM's to all processes of a step, to the ranks.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

from titan_tts.launch.supervisor import children, wait_passing_on
from torchtitan.models.dit_tts.errors import show
from torchtitan.models.dit_tts.run.launcher import die_with_parent

_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_AGENT = (
    "import sys; from titan_tts.overlay import call_in_overlay; "
    "sys.exit(call_in_overlay('titan_tts.launch.torchrun:agent', sys.argv[1:]))"
)


def launch(args: list[str]) -> int:
    """Runs torchrun with its own arguments. Returns the first failed rank's exit status, or 0."""
    show("titan-tts train: starting")
    process = subprocess.Popen([sys.executable, "-c", _AGENT, *args], start_new_session=True)

    def pass_on(number: int) -> None:
        # Before it has ranks there is nothing to save.
        for pid in children(process.pid) or [process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    return wait_passing_on(process, _PASSED_ON, pass_on)


def agent(args: list[str]) -> int:
    """torchrun in this process, which ends with its ranks or its parent."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    parent = os.getppid()

    def leave_to_ranks(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent or not children(os.getpid()):
            sent = signal.Signals(number)
            raise SignalException(f"terminated by {sent.name}", sent)

    for each in _PASSED_ON:
        signal.signal(each, leave_to_ranks)
    die_with_parent()
    try:
        # torchrun's own handlers would replace these: it gets a signal that nobody sends.
        torchrun(["--signals-to-handle", "SIGURG", *args])
    except SignalException as error:
        print(f"error: {error}", file=sys.stderr)
        return 128 + error.sigval
    except RendezvousError as error:
        remedy = "give all --nodes of them the same command, with a --rendezvous that each reaches"
        show(f"error: the machines have not met ({type(error).__name__}); {remedy}", sys.stderr)
        return 1
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank that a signal ended has a negative status; shells call that 128 + signal.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
