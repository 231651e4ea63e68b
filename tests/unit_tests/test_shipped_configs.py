"""The configs that the repository ships can start, on every number of ranks that divides the batch."""

from pathlib import Path

import pytest

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config import load_config
from torchtitan.models.dit_tts.validate import validate_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_valid_on_every_fitting_number_of_ranks(path):
    config = load_config(["--job.config_file", str(path)])
    flavors = model_flavors()
    flavors[config.model.flavor].update_from_config(config)
    training = config.training
    fitting = [
        ranks
        for ranks in (1, 2, 4, 8, 16, 32, 64, 128)
        if training.global_batch_size % (max(training.local_batch_size, 1) * ranks) == 0
    ]
    assert len(fitting) >= 3
    for ranks in fitting:
        validate_config(config, ranks, list(flavors))


def test_there_is_one_for_each_flavor():
    flavors = {load_config(["--job.config_file", str(path)]).model.flavor for path in CONFIGS}
    assert flavors == set(model_flavors())
