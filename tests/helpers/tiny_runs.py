"""Training runs of a tiny model in the test's process; the fixtures are those of all unit tests."""

import gc
import json
import logging
import math
import os
import signal
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from torchtitan.models.dit_tts.errors import without_secrets
from torchtitan.models.dit_tts.files import JsonLines

TINY = """
--data.latent_channels=8 --data.max_frames=32 --data.max_speaker_frames=32 --data.max_text_tokens=48
--data.num_buckets=2 --data.batch_multiple=4 --data.num_workers=0 --data.audit --encoder.n_layers=1
--encoder.n_heads=2 --training.global_batch_size=8 --training.local_batch_size=4 --optimizer.lr=0.01
--training.mixed_precision_param=float32 --lr_scheduler.warmup_steps=3 --ema.decays=0.2,0.999 --debug.seed=1
--checkpoint.interval=2 --metrics.log_freq=1 --metrics.no-enable-tensorboard
""".split()


@dataclass
class Folder:
    """What a run has left."""

    path: Path

    def metrics(self) -> list[dict]:
        return JsonLines(self.path / "metrics.jsonl").read()

    def losses(self) -> dict[int, float]:
        rows = self.metrics()
        assert [row["step"] for row in rows] == list(range(rows[0]["step"], rows[-1]["step"] + 1))
        return {row["step"]: row["loss"] for row in rows}

    def audit(self) -> list[dict]:
        return JsonLines(self.path / "audit" / "rank0.jsonl").read()

    def state(self) -> dict:
        return json.loads((self.path / "state.json").read_text())

    def checkpoint(self, step: int) -> dict:
        import torch
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        file = self.path.with_suffix(".pt")
        dcp_to_torch_save(self.path / f"checkpoint/step-{step}", file)
        return torch.load(file, weights_only=False)

    def tensors(self, step: int) -> dict:
        """Weights and averages of a checkpoint."""
        import torch

        saved = self.checkpoint(step)
        averages = {f"ema.{name}": value for name, value in saved.get("ema", {}).items()}
        every = {**saved, **averages}.items()
        return {name: value for name, value in every if isinstance(value, torch.Tensor)}

    def validation(self) -> list[dict]:
        return JsonLines(self.path / "validation.jsonl").read()

    def checkpoints(self) -> set[str]:
        return {each.name for each in (self.path / "checkpoint").iterdir()}


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """42 samples of 8 channels, which no batch divides; not to be changed."""
    from tests.helpers.loaders import build
    from tools.harness.synthetic import make_shards

    folder = tmp_path_factory.mktemp("data")
    make_shards(folder, 42, channels=8, frames=lambda generator: int(generator.integers(8, 33)))
    build(folder)  # indexed once, while all of it is valid
    return folder


@pytest.fixture
def train(tmp_path, tiny_data, monkeypatch):
    """Trains a tiny model in the folder of a name, by the command line. Returns the exit status.
    `common` is what every run has."""
    import torch

    from tests.helpers.small_models import small_args
    from torchtitan.models.dit_tts import main, model_config
    from torchtitan.models.dit_tts.config.manager import config_from_dict, upstream_view
    from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig
    from torchtitan.models.dit_tts.trainer import DiTTTSTrainer

    arguments = vars(small_args(n_layers=1))
    monkeypatch.setitem(model_config._FLAVORS, "debug", DiTTTSModelConfig(**arguments))
    # Upstream waits two seconds for other ranks, and takes pytest's handlers off the logger.
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    monkeypatch.setattr("torchtitan.train.time", clock)
    monkeypatch.setattr("torchtitan.tools.logging.init_logger", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    trainers = []
    close = DiTTTSTrainer.close
    monkeypatch.setattr(DiTTTSTrainer, "close", lambda each: close(trainers.append(each) or each))

    def check_configs(folder: Path) -> None:
        """Nothing has changed the resolved config: it is what was written, and what upstream sees."""
        config = trainers[-1].config
        content = tomllib.loads((folder / "config.toml").read_text())
        written = asdict(config_from_dict(content, "config.toml"))
        assert written == without_secrets(asdict(config))
        assert upstream_view(config, folder, 1) == trainers[-1].job_config

    def run(name: str, *arguments: str, common: Sequence[str] = TINY) -> int:
        place = [
            f"--job.dump_folder={tmp_path}",
            f"--job.experiment={name}",
            f"--data.path={tiny_data}",
        ]
        with mock.patch.dict(os.environ):
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(variable, None)
            try:
                status = main.train([*place, *common, *arguments])
                if status == 0:
                    check_configs(tmp_path / name)
                return status
            finally:
                trainers.clear()
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()

    yield run
    logging.getLogger().removeFilter(main.concerns_this_run)
    signal.signal(signal.SIGTERM, before)
    gc.enable()


@pytest.fixture
def after_step(monkeypatch):
    """Calls functions of the trainer at the end of steps, before what is saved there."""
    from torchtitan.models.dit_tts.trainer import DiTTTSTrainer

    def patch(functions) -> None:
        step = DiTTTSTrainer.train_step

        def watched(trainer, data_iterator):
            step(trainer, data_iterator)
            functions.get(trainer.step, lambda _: None)(trainer)

        monkeypatch.setattr(DiTTTSTrainer, "train_step", watched)

    return patch


@pytest.fixture
def bad_batches(monkeypatch):
    """Sets what the losses of global batches, by their number, are multiplied by."""
    from torchtitan.models.dit_tts.forward_pass import ForwardPass

    factors: dict[int, float] = {}
    loss_sum = ForwardPass.loss_sum

    def planted(forward_pass, batch):
        factor = factors.get(int(batch["global_batch"]), 1.0)
        return factor * loss_sum(forward_pass, batch)

    monkeypatch.setattr(ForwardPass, "loss_sum", planted)
    return factors


@pytest.fixture
def skip_from_the_start(monkeypatch):
    """Trains without these global batches."""
    from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader

    init = LatentDataLoader.__init__

    def patch(numbers) -> None:
        def skipping(loader, *arguments, **options):
            init(loader, *arguments, **options)
            loader.skipped = set(numbers)

        monkeypatch.setattr(LatentDataLoader, "__init__", skipping)

    return patch


def killed(*_) -> None:
    raise RuntimeError("killed")


def break_weights(trainer) -> None:
    trainer.model_parts[0].output.bias.data.fill_(math.nan)
