"""The frozen text encoder of a run."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Encoder, JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import text_encoder
from torchtitan.models.dit_tts.infra.text_encoder import build_frozen_encoder
from torchtitan.models.dit_tts.text.encoder_record import read_record


def test_texts_longer_than_the_encoders_positions_are_refused(monkeypatch, tmp_path):
    settings = JobConfig(encoder=Encoder(model="some/encoder"))
    settings.job.dump_folder = str(tmp_path)
    source = SimpleNamespace(max_tokens=191)
    monkeypatch.setattr(text_encoder, "find_source", lambda *_, **__: source)
    with pytest.raises(InputError, match="max_text_tokens = 192, but some/encoder .* 191 tokens"):
        build_frozen_encoder(settings, torch.device("cpu"))


@pytest.mark.long
def test_weights_go_with_the_encoder_that_their_own_run_has_recorded(tmp_path, one_process_group):
    first, other = (str(write_tiny_t5(tmp_path / f"t5-{seed}", seed)) for seed in range(2))

    def build(name, model, weights=""):
        settings = JobConfig(encoder=Encoder(model=model))
        settings.job.dump_folder = str(tmp_path / name)
        settings.checkpoint.initial_load_path = weights
        return build_frozen_encoder(settings, torch.device("cpu"))

    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    assert build("before", first).width == 48
    weights = str(tmp_path / "before/checkpoint/step-2")
    refused(lambda: build("after", other, weights), "before was trained with weights")
    assert read_record(tmp_path / "after") is None
    build("after", first, weights)
    records = [read_record(tmp_path / name) for name in ("before", "after")]
    assert records[0] == records[1] and records[0]["fingerprint"]
    # Once it has weights of its own, its record is theirs, wherever the encoder now is.
    (tmp_path / "after/checkpoint/step-1").mkdir(parents=True)
    (tmp_path / "after/checkpoint/step-1/.metadata").touch()
    refused(lambda: build("after", other), "after was trained with weights")
    build("after", str(shutil.move(first, tmp_path / "moved")))
    assert read_record(tmp_path / "after") == records[0]
