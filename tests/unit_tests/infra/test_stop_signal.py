"""Signals that end a run, and the rank for which the others wait."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.infra import stop_signal
from torchtitan.models.dit_tts.infra.stop_signal import Progress, Stopped, StopSignal, state_after


def test_only_a_second_signal_ends_a_process_at_once(monkeypatch):
    """A terminal and a launcher send a signal while the main thread runs no Python; a person then one more."""
    ended = []
    monkeypatch.setattr(stop_signal, "_SAME_SECONDS", 0.1)
    monkeypatch.setattr(stop_signal.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(os, "_exit", ended.append)
    stop = StopSignal(ended.append)
    own, (reader, writer) = os.getpid(), os.pipe()

    def end() -> None:
        os.kill(own, signal.SIGTERM)
        time.sleep(0.02)
        os.kill(own, signal.SIGHUP)
        time.sleep(0.2)
        os.write(writer, b"x")

    try:
        with pytest.raises(KeyboardInterrupt, match="terminated by SIGTERM"):
            signal.raise_signal(signal.SIGTERM)  # before the first step
        stop.arm(timedelta())
        for number in stop_signal.SIGNALS:
            signal.siginterrupt(number, False)  # the call continues
        threading.Thread(target=end).start()
        os.read(reader, 1)
        assert stop.agreed() in (signal.SIGTERM, signal.SIGHUP) and not ended
        for _ in range(500):
            if len(ended) < 2:
                os.kill(own, signal.SIGUSR1)
                time.sleep(0.02)
    finally:
        stop.close()
    assert ended[:2] == [signal.SIGUSR1, 128 + signal.SIGUSR1]
    states = {number.name: state_after(number) for number in stop_signal.SIGNALS}
    assert states == dict.fromkeys(("SIGTERM", "SIGUSR1", "SIGUSR2"), "preempted") | dict.fromkeys(
        ("SIGINT", "SIGHUP", "SIGQUIT"), "interrupted"
    )


def agree_and_stall(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    stop, progress = StopSignal(lambda number: None), Progress()
    stop.arm(timedelta(seconds=20))
    progress.at(1, 0)
    assert stop.agreed() == 0
    done = []
    with pytest.raises(Stopped):
        for each in stop.until_stopped(range(4)):
            done.append(each)
            if (rank, each) == (1, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
    assert done == [0, 1] and stop.agreed() == signal.SIGUSR1
    stop.close()
    progress.at(2, 1 if rank == 0 else 0)
    dist.barrier()
    assert progress.behind() == "rank 1 stalls at step 2, loading its batches"
    dist.barrier()
    progress.at(*((3, 0) if rank == 0 else (2, 1)))
    dist.barrier()
    assert progress.behind() == "rank 1 stalls at step 2, in the model or a collective"
    dist.barrier()


@pytest.mark.long
def test_ranks_agree_and_the_stalled_one_is_named(tmp_path):
    run_ranks(agree_and_stall, 2, str(tmp_path))
