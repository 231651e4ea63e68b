"""A text encoder and a codec that a run had from folders are in its export, which needs these no longer."""

import json
import shutil

import pytest
import torch

from tests.helpers.exported_run import export
from tests.helpers.pretrained_checkpoints import write_tiny_t5
from tests.helpers.sentences import refused
from titan_tts import from_pretrained
from titan_tts.export.exporter import safe_files
from titan_tts.prepare.settings import AudioSettings
from titan_tts.speak.speech_data import reference_settings
from tools.harness.dac_vae_checkpoints import write_tiny_dac_vae
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.speech.codec import build_codec

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]


@pytest.mark.parametrize("frozen", [True, False])
def test_encoder_and_codec(frozen, train, tmp_path):
    sources = tmp_path / "sources"
    (sources / "dac").mkdir(parents=True)
    weights = write_tiny_dac_vae(sources / "dac")
    channels = build_codec(str(weights)).latent_channels
    make_shards(sources / "data", 16, channels=channels, frames=lambda _: 16)
    codec = {"codec": str(weights), "codec_fingerprint": build_codec(str(weights)).fingerprint}
    audio = {"loudness": -20.0, "max_silence": 0.5}
    settings = {"settings": codec | {"audio": audio}}
    (sources / "data/prepare.json").write_text(json.dumps(settings))
    options = [
        f"--data.path={sources / 'data'}",
        f"--data.latent_channels={channels}",
        f"--encoder.model={write_tiny_t5(sources / 't5')}",
        f"--encoder.frozen={str(frozen).lower()}",
        f"--sampling.codec={weights}",
        "--sampling.steps=1",
    ]
    assert train("run", *options, "--training.steps=2") == 0
    run = from_pretrained(tmp_path / "run", weights="raw")
    [said] = run.synthesize(["one two"], ["s1"], seed=4)
    # A frozen encoder may have moved; of a trained one nothing but the run is needed.
    (sources / "t5").rename(tmp_path / "there")
    options = ["--weights=raw", "--voices=s1", f"--encoder={tmp_path / 'there'}"]
    folder = export(tmp_path / "run", tmp_path / "out", *options)
    shutil.rmtree(sources)
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "there")
    moved = from_pretrained(folder.rename(tmp_path / "moved"))
    assert reference_settings(moved.data_path) == AudioSettings(**audio)
    [again] = moved.synthesize(["one two"], ["s1"], seed=4)
    assert torch.equal(said.waveform, again.waveform) and said.sample_rate == again.sample_rate
    assert (tmp_path / "moved/text_encoder").is_dir() == frozen
    for path in (tmp_path / "moved").rglob("*.json"):
        assert str(sources) not in path.read_text(), path


def test_an_encoder_in_a_pickle_is_not_exported(tmp_path):
    weights = write_tiny_t5(tmp_path / "t5") / "model.safetensors"
    torch.save({}, weights.with_name("pytorch_model.bin"))
    assert weights in safe_files(tmp_path / "t5")
    weights.unlink()
    refused(lambda: safe_files(tmp_path / "t5"), "weights in a pickle", "safetensors")
