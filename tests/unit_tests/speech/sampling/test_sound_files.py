"""Speech as sound files."""

import numpy as np
import soundfile
import torch

from torchtitan.models.dit_tts.speech.sampling.sound_files import write_sound


def test_a_wav_holds_the_samples(tmp_path):
    write_sound(tmp_path / "a.wav", torch.tensor([0.0, 0.5, -0.25, 3.0, -3.0]), 24_000)
    samples, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 24_000 and soundfile.info(tmp_path / "a.wav").subtype == "PCM_16"
    np.testing.assert_allclose(samples, [0.0, 0.5, -0.25, 1.0, -1.0], atol=1e-4)
