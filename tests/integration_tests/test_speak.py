"""From recordings to speech with the real parts in small, a DAC-VAE and a T5Gemma2."""

import json

import numpy as np
import pytest
import soundfile

from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tests.helpers.speech_corpora import CORPUS, speech, write_ljspeech
from tools.harness import runs
from tools.harness.dac_vae_checkpoints import write_tiny_dac_vae
from tools.harness.forked import titan_tts

DIGITS = "words:zero,one,two,three,four,five,six,seven,eight,nine"


def command(*arguments):
    done = titan_tts(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a corpus of recordings and prepared shards, and a run of three steps on them."""
    folder = tmp_path_factory.mktemp("speak")
    corpus = write_ljspeech(folder / "corpus", speech(each=8))
    encoder = write_tiny_t5gemma2(folder / "encoder")
    (folder / "codec").mkdir()
    codec = write_tiny_dac_vae(folder / "codec")
    command("prepare", corpus, folder / "data", "--codec", codec, "--heldout-fraction=0.1")
    arguments = [f"--data.path={folder / 'data/train'}", "--data.max_frames=128"]
    arguments += ["--data.conditioning=duration", f"--encoder.model={encoder}"]
    arguments += ["--encoder.dtype=float32", f"--sampling.codec={codec}", "--training.steps=3"]
    arguments += ["--training.global_batch_size=4", "--metrics.log_freq=1"]
    return folder, runs.run(folder, "run", arguments)


def test_a_voice_from_a_wav_says_a_text_into_a_wav(trained):
    folder, run = trained
    reference, out = sorted((folder / "corpus/wavs").glob("*.wav"))[0], folder / "said.wav"
    voice = ["--reference", reference, "--sampling-steps=2"]
    words = ["--text=three one four", "--seconds=1.2"]
    command("generate", run.folder, *voice, *words, "--out", out)
    samples, rate = soundfile.read(out)
    assert (rate, len(samples)) == (48_000, 57_600)
    assert np.isfinite(samples).all() and samples.std() > 1e-4 and np.abs(samples).max() <= 1
    again = folder / "again.wav"
    command("generate", run.folder, *voice, "--text=nine", "--out", again)
    # One word, by the fit: longer than a sixth of a second, shorter than the three of before.
    assert 48_000 / 6 < len(soundfile.read(again)[0]) < 57_600


def test_a_recognizer_reads_recordings_and_speech_at_their_own_rates(trained):
    folder, run = trained
    sources = ["--test", folder / "data/heldout", "--recordings", CORPUS, "--recognizer", DIGITS]
    more = ["--speaker-scorer=resemblyzer", "--sampling-steps=1", "--seeds=1", "--on-page=1"]
    command("evaluate", run.folder, *sources, *more)
    out = run.folder / "evaluation/step-3-data-heldout"
    report = json.loads((out / "evaluation.json").read_text())
    # The recordings are real and have 16 kHz; codec and model have random weights, and 48 kHz.
    figures = {row["kind"]: row["figures"] for row in report["rows"]}
    assert figures.keys() == {"recordings", "codec", "system"}
    assert figures["recordings"]["wer"]["value"] < 0.1
    voices = [each["speaker_similarity"]["value"] for each in figures.values()]
    assert -1 <= min(voices) and max(voices) <= 1
    wavs = sorted((out / "wavs").rglob("*.wav"))
    assert len(wavs) == len(report["utterances"]) > 0
    assert {soundfile.info(wav).samplerate for wav in wavs} == {48_000}
    assert (out / "evaluation.html").is_file()
