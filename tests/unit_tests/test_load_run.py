"""A run's model, as it is built to sample from."""

import pytest
import torch

from torchtitan.models.dit_tts.config import load_config
from torchtitan.models.dit_tts.flow.objective import build_objective
from torchtitan.models.dit_tts.inference.load_run import LoadedRun, untrained_model


@pytest.mark.parametrize("backend", ["flex", "varlen", "auto"])
def test_sampling_does_not_need_the_runs_attention_kernel(tmp_path, backend):
    """It compiles nothing, and uncompiled flex attention would hold all scores."""
    config = load_config([f"--attention.backend={backend}"])
    run = LoadedRun(
        tmp_path, config, None, None, None, build_objective(config), 1, torch.device("cpu")
    )
    model = untrained_model(run)
    assert model.args.attention == "sdpa" and not model.training
    assert config.attention.backend == backend
