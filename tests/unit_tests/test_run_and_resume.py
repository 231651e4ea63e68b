"""A run in this process, and the run that goes on from its checkpoint."""

import gc
import json
import logging
import shutil
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.synthetic import make_shards
from torchtitan.models import dit_tts
from torchtitan.models.dit_tts import main
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.tools.logging import logger

ARGS = DiTTTSModelArgs(
    dim=32, n_layers=1, n_heads=2, mlp_dim=48, speaker_dim=32, speaker_n_layers=1,
    speaker_n_heads=2, speaker_mlp_dim=48, text_dim=32, adaln_rank=8, timestep_dim=16,
)  # fmt: skip


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setitem(dit_tts._FLAVORS, "debug", ARGS)
    monkeypatch.setattr("torchtitan.train.time", SimpleNamespace(sleep=lambda s: None, perf_counter=__import__("time").perf_counter))
    data = make_shards(tmp_path / "data", 40, channels=8, frames=lambda g: int(g.integers(8, 33)))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        import os
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        return main.train([
            f"--job.dump_folder={tmp_path}", "--job.experiment=run", f"--data.path={data}",
            "--data.latent_channels=8", "--data.max_frames=32", "--data.max_speaker_frames=32", "--data.max_text_tokens=48",
            "--data.num_workers=0", "--data.num_buckets=2",
            "--training.global_batch_size=8", "--training.mixed_precision_param=float32",
            "--checkpoint.enable", "--checkpoint.interval=2", "--metrics.log_freq=1", "--metrics.no-enable-tensorboard", "--data.audit",
            "--encoder.n_layers=1", "--encoder.n_heads=2", "--encoder.dim=32", "--debug.seed=1", *arguments])

    return run


def test_x(tmp_path, train):
    import time
    t = time.time()
    assert train("--training.steps=4") == 0
    print("life", time.time() - t); t = time.time()
    assert train("--training.steps=6") == 0
    print("life", time.time() - t)
    print(sorted(p.name for p in (tmp_path / "run").iterdir()), (tmp_path / "run/state.json").read_text())
    for l in (tmp_path / "run/metrics.jsonl").read_text().splitlines(): print(l[:300])
