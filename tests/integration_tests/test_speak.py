"""From recordings to speech: prepare, train a little, generate, evaluate; and with conditioning tokens."""

import json

import pytest
import soundfile

from tests.helpers.speech_corpora import speech, write_webdataset
from tools.harness import runs
from tools.harness.forked import titan_tts
from tools.harness.synthetic import make_shards

DIGITS = "words:zero,one,two,three,four,five,six,seven,eight,nine"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Prepared shards and a run of three steps on them."""
    folder = tmp_path_factory.mktemp("speak")
    corpus = write_webdataset(folder / "corpus", speech(each=12))
    made = titan_tts("prepare", corpus, folder / "data", "--workers", "1")
    assert made.returncode == 0, made.stderr
    arguments = [f"--data.path={folder / 'data/train'}", "--training.steps=3"]
    return folder, runs.run(folder, "run", arguments)


def generate(run, *arguments):
    done = titan_tts("generate", run.folder, *arguments, "--sampling-steps=2")
    assert done.returncode == 0, done.stderr


def test_generate_writes_a_wav_of_the_asked_length(trained):
    folder, run = trained
    out = folder / "pi.wav"
    generate(run, "--speaker=slt", "--text=three one four", "--seconds=1.2", "--out", out)
    samples, rate = soundfile.read(out)
    assert (rate, len(samples)) == (16000, 19200)

    again = folder / "again.wav"
    generate(run, "--reference", out, "--text=nine", "--out", again)
    # One word, by the fit: longer than a sixth of a second, shorter than the three of before.
    assert 16000 / 6 < len(soundfile.read(again)[0]) < 19200


def test_evaluate_reads_recordings_and_codec(trained):
    folder, run = trained
    sources = ["--test", folder / "data/heldout", "--recordings", folder / "corpus"]
    sources += ["--recognizer", DIGITS]
    more = ["--speaker-scorer=own", "--sampling-steps=2", "--seeds=1", "--on-page=2"]
    done = titan_tts("evaluate", run.folder, *sources, *more)
    assert done.returncode == 0, done.stderr
    out = run.folder / "evaluation/step-3-data-heldout"
    report = json.loads((out / "evaluation.json").read_text())
    figures = {row["name"]: row["figures"] for row in report["rows"]}
    # Speech after three steps is not intelligible.
    assert figures.keys() == {"recordings", "codec", "run@3"}
    assert figures["recordings"]["wer"]["value"] < 0.1 and figures["codec"]["wer"]["value"] < 0.1
    voices = {name: row["speaker_similarity"]["value"] for name, row in figures.items()}
    assert -1 <= min(voices.values()) and max(voices.values()) <= 1
    assert "not independent" in report["scorers"]["speaker"]
    assert len(list((out / "wavs").rglob("*.wav"))) == len(report["utterances"]) == 4
    assert (out / "evaluation.html").read_text().count("<section>") == 2


def test_conditioning_tokens_of_a_run_on_two_ranks_change_the_speech(tmp_path):
    data = make_shards(tmp_path / "data", 24, seed=4)
    arguments = [*runs.TINY, "--encoder.model=chars", "--data.conditioning=speaker,duration"]
    arguments += [f"--data.path={data}", "--training.local_batch_size=4", "--training.steps=2"]
    run = runs.run(tmp_path, "run", [*arguments, "--parallelism.data_parallel_shard_degree=2"], 2)
    tokens = json.loads((run.folder / "tokenizer.json").read_text())
    assert tokens["conditioning"][0] == {"field": "speaker", "values": ["s0", "s1", "s2", "s3"]}
    assert f"vocab_size = {tokens['vocab_size']}" in (run.folder / "config.toml").read_text()
    sounds = []
    for token in ([], ["--condition=speaker=s2"]):  # the same voice and length
        out = tmp_path / f"said{len(token)}.wav"
        words = ["--speaker=s1", "--text=one two", "--seconds=0.8", "--out", out]
        generate(run, *token, *words)
        sounds.append(soundfile.read(out)[0])
    assert len(sounds[0]) == len(sounds[1]) == 12800
    assert abs(sounds[0] - sounds[1]).max() > 1e-4
