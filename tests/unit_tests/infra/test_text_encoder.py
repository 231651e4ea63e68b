"""The frozen text encoder of a run."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.small_models import one_rank
from torchtitan.models.dit_tts.config.job_config import Encoder, JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import text_encoder
from torchtitan.models.dit_tts.infra.text_encoder import build_frozen_encoder


def test_texts_longer_than_the_encoders_positions_are_refused(monkeypatch, tmp_path):
    settings = JobConfig(encoder=Encoder(model="some/encoder"))
    settings.job.dump_folder = str(tmp_path)
    source = SimpleNamespace(max_tokens=191)
    monkeypatch.setattr(text_encoder, "find_source", lambda *_, **__: source)
    with pytest.raises(InputError, match="max_text_tokens = 192, but some/encoder .* 191 tokens"):
        build_frozen_encoder(settings, one_rank(), torch.device("cpu"))
