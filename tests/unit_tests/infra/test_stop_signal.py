"""Signals that end a run, and the rank that the others wait for."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tools.harness import forked
from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.infra.stop_signal import Progress, StopSignal, state_after

STANDS_STILL = """
import os, signal, sys, threading
from types import SimpleNamespace
from unittest import mock
from torchtitan.models.dit_tts.infra import stop_signal
with mock.patch.object(stop_signal.dist, "get_world_size", lambda: 1):
    stop = stop_signal.StopSignal(lambda number: print("at once", number, flush=True))
    if "early" not in sys.argv:
        stop.arm(None)
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire() if "early" not in sys.argv else signal.pause()
"""


@pytest.mark.long
def test_a_second_signal_ends_a_process_that_stands_still():
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL], stdout=subprocess.PIPE, text=True, cwd=forked.ROOT
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):  # as of a terminal and a launcher: one request
        process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 128 + signal.SIGUSR1
    assert process.stdout.read() == f"at once {signal.SIGUSR1.value}\n"


@pytest.mark.long
def test_a_signal_before_the_first_step_interrupts():
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, "early"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=forked.ROOT,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert "KeyboardInterrupt: terminated by SIGTERM" in error


def test_states():
    assert [state_after(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == ["preempted"] * 2
    others = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert [state_after(n) for n in others] == ["interrupted"] * 3


def agree_and_stall(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    stop, progress = StopSignal(lambda number: None), Progress()
    stop.arm(timedelta(seconds=20))
    progress.at(1, 0)
    assert stop.agreed() == 0
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.agreed() == signal.SIGUSR1
    stop.close()
    dist.barrier()
    assert progress.behind() == ""
    dist.barrier()
    progress.at(2, 0)
    if rank == 0:
        progress.at(2, 1)
    dist.barrier()
    assert progress.behind() == "rank 1 stalls at step 2, loading its batches"
    dist.barrier()
    if rank == 1:
        progress.at(2, 1)
    if rank == 0:
        progress.at(3, 0)
    dist.barrier()
    assert progress.behind() == "rank 1 stalls at step 2, in the model or a collective"
    dist.barrier()


def test_ranks_agree_and_the_stalled_one_is_named(tmp_path):
    run_ranks(agree_and_stall, 2, str(tmp_path))
