"""Validation and samples of runs with a pretrained text encoder, wherever its features come from."""

import pytest
import soundfile
import torch

from tests.helpers.encoded_shards import Made
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tests.helpers.tiny_runs import Folder
from tools.harness.synthetic import make_shards

pytestmark = pytest.mark.long


@torch.no_grad()
def listen(trainer) -> None:
    """Weights with which the text matters, as after a long training."""
    generator = torch.Generator().manual_seed(3)
    for value in [*trainer.model_parts[0].parameters(), *trainer.ema.averages[0.999].values()]:
        if value.dim() > 1:
            drawn = torch.randn(value.shape, generator=generator)
            value.copy_(1.5 * drawn / value.shape[-1] ** 0.5)


def test_stored_features_give_the_figures_and_sounds_of_the_encoder(tmp_path, train, after_step):
    after_step({2: listen})
    frames = lambda generator: int(generator.integers(8, 33))  # noqa: E731
    for name, n, seed in (("train", 16, 1), ("heldout", 6, 2)):
        make_shards(tmp_path / "data" / name, n, seed, channels=128, frames=frames)
    encoder = write_tiny_t5gemma2(tmp_path / "encoder")
    for name in ("train", "heldout"):
        Made(tmp_path / "data" / name, encoder, channels=128).make()
    options = [
        f"--data.path={tmp_path}/data/train",
        "--data.latent_channels=128",
        "--data.conditioning=speaker,duration",
        f"--encoder.model={encoder}",
        "--encoder.dtype=float32",
        "--training.steps=2",
        "--validation.batch_size=4",
        "--validation.times=0.9,0.3",
        "--samples.freq=2",
        "--samples.count=2",
        "--sampling.steps=2",
        "--sampling.codec=mel_dct",
    ]
    found, sounds = {}, {}
    for name, more in (("beside", []), ("stored", ["--encoder.cache_features"])):
        assert train(name, *options, *more) == 0
        found[name] = Folder(tmp_path / name).validation()[0]
        files = sorted((tmp_path / name / "samples/step-2").glob("*.wav"))
        sounds[name] = [soundfile.read(file)[0] for file in files]
    figures = [key for key, value in found["beside"].items() if isinstance(value, float)]
    figures = [key for key in figures if key not in ("time", "seconds")]
    assert {"text_gain_at_0.9", "speaker_gain", "heldout_loss_raw"} <= set(figures)
    for figure in figures:
        assert found["stored"][figure] == pytest.approx(found["beside"][figure], abs=1e-4), figure
    assert abs(found["stored"]["text_gain"]) > 3e-4  # more than the tolerance above
    assert len(sounds["beside"]) == 2
    for sound, other in zip(sounds["beside"], sounds["stored"], strict=True):
        assert abs(sound - other).max() < 0.1 * abs(sound).max(), (
            abs(sound).max(),
            abs(sound - other).max(),
        )
