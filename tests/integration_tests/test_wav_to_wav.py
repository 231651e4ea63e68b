"""The debug job with the real parts in small: recordings through a DAC-VAE and a T5Gemma2 to speech."""

import json

import numpy as np
import pytest
import soundfile

from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from tests.helpers.speech_corpora import CORPUS, speech, write_ljspeech
from tools.harness import runs
from tools.harness.dac_vae_checkpoints import write_tiny_dac_vae
from tools.harness.forked import titan_tts


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A corpus of recordings, an encoder, a codec, and shards made by the two."""
    folder = tmp_path_factory.mktemp("wav_to_wav")
    corpus = write_ljspeech(folder / "corpus", speech(each=8))
    encoder = write_tiny_t5gemma2(folder / "encoder")
    (folder / "codec").mkdir()
    codec = write_tiny_dac_vae(folder / "codec")
    options = ["--codec", codec, "--heldout-fraction=0.1", "--text-dtype=float32"]
    made = titan_tts("prepare", corpus, folder / "data", *options, "--encode-text", encoder)
    assert made.returncode == 0, made.stderr
    return folder, corpus, encoder, codec


def train(folder, name, encoder, codec, *arguments):
    common = [f"--data.path={folder / 'data/train'}", "--data.max_frames=128"]
    common += ["--data.conditioning=duration", f"--encoder.model={encoder}"]
    common += ["--encoder.dtype=float32", f"--sampling.codec={codec}", "--training.steps=3"]
    common += ["--training.global_batch_size=4", "--metrics.log_freq=1"]
    return runs.run(folder, name, [*common, *arguments])


@pytest.fixture(scope="module")
def trained(parts):
    folder, _, encoder, codec = parts
    return train(folder, "run", encoder, codec)


def test_the_stored_features_train_as_the_encoder_does(parts, trained):
    folder, _, encoder, codec = parts
    weights = encoder / "model.safetensors"
    hidden = weights.rename(folder / "hidden.safetensors")
    try:
        cached = train(folder, "cached", encoder, codec, "--encoder.cache_features")
    finally:
        hidden.rename(weights)
    for step, row in trained.metrics().items():
        assert cached.metrics()[step]["loss"] == pytest.approx(row["loss"], abs=1e-5)
    records = [
        json.loads((run.folder / "text_encoder.json").read_text()) for run in (trained, cached)
    ]
    assert records[0] == records[1]


def test_a_voice_from_a_wav_says_a_text_into_a_wav(parts, trained):
    folder, corpus, *_ = parts
    reference = sorted((corpus / "wavs").glob("*.wav"))[0]
    out = folder / "said.wav"
    words = ["--text=three one four", "--seconds=1.2", "--sampling-steps=2"]
    done = titan_tts("generate", trained.folder, "--reference", reference, *words, "--out", out)
    assert done.returncode == 0, done.stderr
    samples, rate = soundfile.read(out)
    assert (rate, len(samples)) == (48_000, 57_600)
    assert np.isfinite(samples).all() and samples.std() > 1e-4 and np.abs(samples).max() <= 1


def test_a_recognizer_reads_recordings_and_speech_at_their_own_rates(parts, trained):
    folder, *_ = parts
    words = "words:zero,one,two,three,four,five,six,seven,eight,nine"
    sources = ["--test", folder / "data/heldout", "--recordings", CORPUS, "--recognizer", words]
    more = ["--sampling-steps=1", "--seeds=1", "--on-page=1", "--out", folder / "out"]
    done = titan_tts("evaluate", trained.folder, *sources, *more)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "out/evaluation.json").read_text())
    # The recordings are real and have 16 kHz; codec and model have random weights, and 48 kHz.
    rates = {row["kind"]: row["figures"]["wer"]["value"] for row in report["rows"]}
    assert rates.keys() == {"recordings", "codec", "system"} and rates["recordings"] < 0.1
    wavs = sorted((folder / "out/wavs").rglob("*.wav"))
    assert len(wavs) == len(report["utterances"]) > 0
    assert {soundfile.info(wav).samplerate for wav in wavs} == {48_000}
