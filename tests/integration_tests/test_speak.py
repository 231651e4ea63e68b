"""From recordings to speech with the real parts in small, a DAC-VAE and a T5Gemma2."""

import numpy as np
import soundfile

from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tests.helpers.speech_corpora import speech, write_ljspeech
from tools.harness import runs
from tools.harness.dac_vae_checkpoints import write_tiny_dac_vae
from tools.harness.forked import titan_tts


def command(*arguments):
    done = titan_tts(*arguments)
    assert done.returncode == 0, done.stderr


def test_a_voice_from_a_wav_says_a_text_into_a_wav(tmp_path):
    """With a run of three steps."""
    corpus = write_ljspeech(tmp_path / "corpus", speech(each=8))
    encoder = write_tiny_t5gemma2(tmp_path / "encoder")
    (tmp_path / "codec").mkdir()
    codec = write_tiny_dac_vae(tmp_path / "codec")
    command("prepare", corpus, tmp_path / "data", "--codec", codec, "--heldout-fraction=0.1")
    arguments = [f"--data.path={tmp_path / 'data/train'}", "--data.max_frames=128"]
    arguments += ["--data.conditioning=duration", f"--encoder.model={encoder}"]
    arguments += ["--encoder.dtype=float32", f"--sampling.codec={codec}", "--training.steps=3"]
    arguments += ["--training.global_batch_size=4", "--metrics.log_freq=1"]
    run = runs.run(tmp_path, "run", arguments)
    reference, out = sorted((tmp_path / "corpus/wavs").glob("*.wav"))[0], tmp_path / "said.wav"
    voice = ["--reference", reference, "--sampling-steps=2"]
    words = ["--text=three one four", "--seconds=1.2"]
    command("generate", run.folder, *voice, *words, "--out", out)
    samples, rate = soundfile.read(out)
    assert (rate, len(samples)) == (48_000, 57_600)
    assert np.isfinite(samples).all() and samples.std() > 1e-4 and np.abs(samples).max() <= 1
    again = tmp_path / "again.wav"
    command("generate", run.folder, *voice, "--text=nine", "--out", again)
    # One word, by the fit: longer than a sixth of a second, shorter than the three of before.
    assert 48_000 / 6 < len(soundfile.read(again)[0]) < 57_600
