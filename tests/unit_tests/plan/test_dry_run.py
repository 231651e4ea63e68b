"""--dry-run prints what a run would take, and starts and writes nothing."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.plan_cases import DEBUG as CONFIG
from tests.helpers.plan_cases import shipped_debug_config
from tests.helpers.sentences import refused
from tests.helpers.sound_samples import CHANNELS, sound_samples, write_shards
from titan_tts.cli import main
from titan_tts.launch.train_command import run_dry
from titan_tts.plan import plan, report
from titan_tts.plan.plan import make_summary
from titan_tts.plan.report import memory_lines, summary_lines
from torchtitan.models.dit_tts.data.dataset import open_dataset

pytestmark = pytest.mark.usefixtures("remembered_passes")
ROOT = Path(__file__).resolve().parents[3]
DEBUG = f"--job.config_file={CONFIG}"
DEGREES = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 3}
DEGREES["tensor_parallel_degree"] = 5


@pytest.mark.parametrize("gpus", ["0", "²"])
def test_a_number_of_gpus_that_is_none(gpus, capsys):
    assert main(["train", DEBUG, "--dry-run", "--nproc", gpus]) == 2
    assert "--nproc" in capsys.readouterr().err


def test_the_number_of_gpus_is_said_with_its_origin(monkeypatch, capsys):
    monkeypatch.setattr(plan, "make_summary", lambda config, gpus: (gpus, None))
    monkeypatch.setattr(report, "summary_lines", lambda gpus, _, why: [f"{gpus} {why}", "end"])
    degrees = [f"--parallelism.{name}={n}" for name, n in DEGREES.items()]
    assert run_dry([DEBUG, *degrees], 1) == run_dry([DEBUG], 1) == run_dry([DEBUG], 5) == 0
    found = [line[:17] for line in capsys.readouterr().out.splitlines()[::2]]
    assert found == ["30 the degrees in", "1 the degrees in ", "5 --nproc times -"]


@pytest.mark.long
def test_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--data.path=nowhere", "--compile.enable", "--activation_checkpoint.mode=full"]
    assert main(["train", DEBUG, *options, "--dry-run", "--nproc=2"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "GPUs: 2 (--nproc times --nodes)",
        "FSDP2, replicas x shards = 1 x 2",
        "trained                3,855,872",
        "activation checkpointing 'full'",
        "titan-tts plan computes how much",
        "2 ranks x 6 samples x 1 accumulation steps = 12 samples",
        "12,783,452,160 training FLOPs",
        # 3,855,872 weights of 4 bytes, of which one rank lacks half.
        "all-gather, forward            0.007 GiB",
        # 12 samples of 2.56 s
        "1,100 steps: up to 9.4 hours of audio, 0.9 of them in the 100 of warm-up",
    ):
        assert words in printed, printed
    assert list(tmp_path.iterdir()) == []
    table = printed.split("Memory of one GPU\n")[1].split("not in the sum")[0]
    *sizes, total = map(float, re.findall(r"^  [a-zA-Z -]+ +([0-9.]+) MiB", table, re.MULTILINE))
    assert len(sizes) >= 8 and sum(sizes) == pytest.approx(total, abs=0.01)


@pytest.mark.long
def test_hours_are_of_the_data_that_are_there(tmp_path):
    """24 samples of 124 frames at most, in one bucket: the mean is their own; without an index nothing is read."""
    samples = sound_samples()
    write_shards(tmp_path, samples, shards=1)
    data = f"--data.path={tmp_path}", f"--data.latent_channels={CHANNELS}", "--data.max_frames=128"
    config = shipped_debug_config(*data, "--data.max_text_tokens=9", "--data.num_buckets=1")
    assert (
        make_summary(config, 1)[0].data_hours_per_step is None
        and len(list(tmp_path.iterdir())) == 1
    )
    open_dataset(str(tmp_path), CHANNELS)
    hours = 1100 * 12 * sum(len(each.latents) for each in samples) / len(samples) / 25 / 3600
    words = f"1,100 steps: {hours:,.1f} hours of audio at the lengths of [data] path, "
    assert words in "\n".join(summary_lines(*make_summary(config, 1), ""))
    config.data.max_frames = min(len(each.latents) for each in samples)
    refused(lambda: make_summary(config, 1), "leaves out", "max_dropped_fraction")


@pytest.mark.long
def test_offloaded_states_are_not_the_gpus():
    config = shipped_debug_config("--training.enable_cpu_offload")
    summary, activations = make_summary(config, 2)
    names = {what for what, _, _ in memory_lines(summary, activations, 6, compiled=False)}
    assert not names & {"weights", "gradients", "optimizer", "EMA"}
    assert {"gathered weights", "saved activations"} <= names
    # Weights, gradients, two moments and EMA of one half: 5 x 4 x 3,855,872 / 2 bytes.
    lines = "\n".join(summary_lines(summary, activations, ""))
    assert "machine's memory for each GPU: 36.77" in lines


@pytest.mark.long
def test_the_script_starts_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)  # as the script does
    python, runs = tmp_path / "python", tmp_path / "runs"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    environment = {**os.environ, "NGPU": "2", "NNODES": "2", "PYTHON": str(python)}
    command = [ROOT / "scripts/train_tts.sh", "--dry-run", f"--job.dump_folder={runs}"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    flag, package, *arguments = ended.stdout.splitlines()
    assert (flag, package) == ("-m", "titan_tts") and main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("Memory of one GPU") == 1
    assert "GPUs: 4 (--nproc times --nodes)" in printed and list(tmp_path.iterdir()) == [python]
