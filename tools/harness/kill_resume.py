"""Kills a training run with SIGKILL at random moments and resumes it on other numbers of processes.

Used by the integration test and, many times over, by benchmarks/kill_resume.py. The data is either
plain, or everything at once: a local and a remote dataset mixed by weight, speakers balanced, durations
weighted, over-long samples left out, corrupt ones skipped.
"""

import json
import random
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tools.harness import runs
from tools.harness.disks import full_disk
from tools.harness.http_server import FolderServer
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.infra.stop_signal import state_after
from torchtitan.models.dit_tts.run.manifest import checkpoint_steps

STEPS = 14

OTHER_ENDS = {
    "corrupt": "SIGKILL, and a flipped bit in the newest checkpoint",
    "full disk": "no space is left; the folder must be on a small disk of its own",
    "second start": "the same command again, which is refused, and then SIGKILL",
}

# (processes, loader threads, further arguments) of each life of the run, in turn. The global batch
# stays 8 samples at the longest bucket; only its split changes.
LIVES = [
    (1, 0, ["--training.local_batch_size=8"]),
    (
        2,
        2,
        [
            "--training.local_batch_size=4",
            "--parallelism.data_parallel_shard_degree=2",
            "--checkpoint.async_mode=async",
        ],
    ),
    (
        4,
        1,
        [
            "--training.local_batch_size=2",
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=2",
        ],
    ),
    (1, 3, ["--training.local_batch_size=4"]),
]


@dataclass
class Outcome:
    """Comparison of a killed and resumed run with the unbroken one."""

    same_ids: bool
    largest_loss_difference: float
    largest_weight_difference: float
    """over the weights and their averages in the last checkpoint"""

    replaced: int
    """corrupt samples of the unbroken run that others replaced"""

    kills: list[int]
    """last step that had been logged when each life ended"""

    ended_by: list[str]


@contextmanager
def plain_data(folder: Path, samples: int = 40) -> Iterator[list[str]]:
    """Arguments of runs on one local dataset."""
    make_shards(folder / "data", samples, seed=5)
    yield ["--data.path", str(folder / "data")]


@contextmanager
def everything_at_once(folder: Path) -> Iterator[list[str]]:
    """Arguments of runs on mixed, balanced and corrupt data, half of it behind a server that
    answers as long as the context lasts, with all that depends on the step's place in the run."""
    for name, seed in (("local", 5), ("remote", 6)):
        make_shards(folder / name, 40, seed=seed)
        open_dataset(str(folder / name))  # writes indexes of the valid shards
        flip_bits(folder / name / "000000.tar", [3 * 2, 3 * 9 + 1, 3 * 14 + 2])
    with FolderServer(folder / "remote") as server:
        yield [
            "--data.path",
            f"{folder / 'local'},{server.url}/{{000000..000001}}.tar",
            "--data.weights",
            "1",
            "2",
            "--data.balance_by=speaker",
            "--data.duration_alpha=0.5",
            "--data.conditioning=speaker,duration",
            "--encoder.model=chars",
            "--data.max_dropped_fraction=0.5",
            "--model.text_positions=none",
            "--data.max_frames=96",
            "--data.on_error=skip",
            "--data.max_corrupt_fraction=0.5",
            "--data.references=drawn",
            "--data.max_caption_tokens=12",
            "--objective.logit_mean=2.193",
            # The gates begin at 0: behind them the first gradients are rounding, which AdamW would make steps of.
            "--optimizer.eps=1e-5",
        ]


@contextmanager
def packed_rows(folder: Path) -> Iterator[list[str]]:
    """The same in packed batches."""
    with everything_at_once(folder) as data:
        yield [*data, "--data.batching=packed", "--data.longest_per_row=1"]


def common_arguments(folder: Path, data: list[str]) -> list[str]:
    return [
        *runs.TINY,
        *data,
        "--data.audit",
        f"--training.steps={STEPS}",
        "--checkpoint.interval=2",
        "--checkpoint.initial_load_path",
        str(folder / "seed" / "checkpoint" / "step-0"),
    ]


def make_seed_checkpoint(folder: Path, data: list[str], launcher: bool = False) -> None:
    arguments = [*runs.TINY, *data, "--checkpoint.create_seed_checkpoint"]
    runs.run(folder, "seed", arguments, launcher=launcher)


def last_weights(run: runs.Run) -> dict[str, torch.Tensor]:
    """Weights and averaged weights (`ema.`) of the checkpoint at the last step."""
    path = run.folder / "checkpoint" / f"step-{STEPS}"
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
        and not name.startswith(("optimizer.", "divergence."))
    }
    assert any(name.startswith("ema.") for name in weights)
    dcp.load(weights, checkpoint_id=path, no_dist=True)
    return weights


def _last_step(run: runs.Run) -> int:
    return max(run.metrics(), default=0)


def wait_for_step(run: runs.Run, step: int) -> None:
    deadline = time.monotonic() + 240
    while _last_step(run) < step:
        status = run.poll()
        assert status is None or _last_step(run) >= step, (
            f"ended with {status} before step {step}:\n{run.log.read_text()[-4000:]}"
        )
        assert time.monotonic() < deadline, (
            f"no step {step} in time:\n{run.log.read_text()[-4000:]}"
        )
        time.sleep(0.02)


def _wait_until_it_runs(life: runs.Run, since: float) -> None:
    """Wait until a life trains, so that the steps waited for later are not those of the life before."""
    deadline = time.monotonic() + 240
    while life.poll() is None:
        state = json.loads((life.folder / "state.json").read_text())
        if state["time"] > since and state["state"] == "running":
            return
        assert time.monotonic() < deadline, life.log.read_text()[-4000:]
        time.sleep(0.02)


def _end_by(life: runs.Run, name: str) -> None:
    """Sends a signal, and checks how the run ends: after a step, saved, with the documented status."""
    number = signal.Signals[name]
    life.signal(number)
    status = life.wait()
    log = life.log.read_text()[-4000:]
    if status == 0:
        return  # it was at its last step
    assert status == 128 + number, f"status {status}:\n{log}"
    state = json.loads((life.folder / "state.json").read_text())
    assert state["state"] == state_after(number) and state["step"] == _last_step(life), log
    assert state["saved_step"] == state["step"], log


def _corrupt_newest(life: runs.Run) -> None:
    folder = life.folder / "checkpoint"
    steps = checkpoint_steps(folder)
    if len(steps) > 1:  # a run with none left is refused
        file = folder / f"step-{steps[-1]}" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def _fill_disk(life: runs.Run, rng: random.Random) -> None:
    """Fills the disk of the run, to the last byte or but for less than a checkpoint, until the run ends."""
    left = rng.choice((0, 20 << 20))
    with full_disk(life.folder.parent, left, lambda: life.poll() is None):
        status = life.wait()
    log = life.log.read_text()
    if status:  # it may have been at its last step
        assert status in (1, 2) and "could not be saved" in log, f"status {status}:\n{log[-4000:]}"
        assert "Traceback" not in log, log[-4000:]


def _start_again(life: runs.Run, arguments: list[str], processes: int) -> None:
    """The same command once more, while the run is at work (and stands still, so that it does not end
    meanwhile): it is refused and changes nothing."""
    life.stop()
    second = runs.start(life.folder.parent, life.folder.name, arguments, processes)
    status, log = second.wait(), second.log.read_text()
    if "The run is complete" not in log:  # the first was at its last step, and had left the folder
        assert status == 2 and "another process trains in it" in log, (
            f"status {status}:\n{log[-4000:]}"
        )


def kill_and_resume(
    folder: Path,
    data: list[str],
    name: str,
    unbroken: runs.Run,
    seed: int,
    launched: Collection[int] = (),
    ends: Sequence[str] = ("SIGKILL",),
) -> Outcome:
    """One run that is ended in every life but the last, at a random step and a random moment of it.

    launched: the lives that are started as a user would; the others are forked.
    ends: of the lives in turn, in an order that is drawn: the name of a signal, or one of `OTHER_ENDS`.
    """
    rng = random.Random(seed)
    drawn = rng.sample(list(ends), len(ends))
    common = common_arguments(folder, data)
    kills, step, ended_by = [], 0, []
    checkpoints = folder / name / "checkpoint"
    theirs = [checkpoints / each for each in ("step-2-keep", "step-4-export", "notes")]
    for number, (processes, threads, arguments) in enumerate(LIVES):
        arguments = [*common, *arguments, f"--data.num_workers={threads}"]
        began = time.time()
        life = runs.start(folder, name, arguments, processes, number in launched)
        if number == len(LIVES) - 1:
            status = life.wait()
            assert status == 0, life.log.read_text()[-4000:]
            break
        try:
            # A resumed life first drops the lines of steps after its checkpoint, so wait for progress
            # beyond what the last life had reached.
            step = min(step + rng.randint(1, 4), STEPS - 2)
            wait_for_step(life, step)
            _wait_until_it_runs(life, began)
            time.sleep(rng.random() * 0.5)
            ended_by.append(drawn[number % len(drawn)])
            if life.poll() is None:
                if ended_by[-1] == "full disk":
                    _fill_disk(life, rng)
                elif ended_by[-1] == "second start":
                    _start_again(life, arguments, processes)
                elif ended_by[-1] not in ("SIGKILL", "corrupt"):
                    _end_by(life, ended_by[-1])
        finally:
            life.kill()
        if ended_by[-1] == "corrupt":
            _corrupt_newest(life)
        for each in theirs:
            each.mkdir(parents=True, exist_ok=True)
        step = _last_step(life)
        kills.append(step)
    assert all(each.is_dir() for each in theirs), "a folder of the user's is gone"
    expected, found = unbroken.metrics(), life.metrics()
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    weights, wanted = last_weights(life), last_weights(unbroken)
    return Outcome(
        same_ids=life.audited_ids(ranks=4) == unbroken.audited_ids(ranks=1),
        largest_loss_difference=max(abs(found[s]["loss"] - expected[s]["loss"]) for s in expected),
        largest_weight_difference=max(
            (weights[name] - wanted[name]).abs().max().item() for name in wanted
        ),
        replaced=sum(row["replaced_samples"] for row in expected.values()),
        kills=kills,
        ended_by=ended_by,
    )
