"""From the embedded recordings to speech: prepare, train a little, generate, evaluate."""

import json
import subprocess
import sys

import pytest
import soundfile

from tests.helpers.speech_corpora import CORPUS
from tools.harness import runs
from tools.harness.forked import titan_tts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Prepared shards and a run of three steps on them."""
    folder = tmp_path_factory.mktemp("speak")
    made = titan_tts("prepare", CORPUS, folder / "data")
    assert made.returncode == 0, made.stderr
    arguments = [f"--data.path={folder / 'data/train'}", "--training.steps=3"]
    return folder, runs.run(folder, "run", arguments)


def generate(run, *arguments):
    done = titan_tts("generate", run.folder, *arguments, "--sampling-steps=2")
    assert done.returncode == 0, done.stderr


def test_generate_writes_a_wav_of_the_asked_length(trained):
    folder, run = trained
    out = folder / "pi.wav"
    generate(run, "--speaker=slt", "--text=three one four", "--duration=1.2", "--out", out)
    samples, rate = soundfile.read(out)
    assert (rate, len(samples)) == (16000, 19200)

    again = folder / "again.wav"
    generate(run, "--reference", out, "--text=nine", "--out", again)
    # One word, by the fit: longer than a sixth of a second, shorter than the three of before.
    assert 16000 / 6 < len(soundfile.read(again)[0]) < 19200


def test_generate_names_the_speakers_there_are(trained):
    folder, run = trained
    done = titan_tts("generate", run.folder, "--speaker", "nobody", "--text", "one")
    assert done.returncode == 2
    assert "'awb', 'kal16', 'rms', 'slt'" in done.stderr and "Traceback" not in done.stderr


def test_evaluate_reads_recordings_codec_and_untrained(trained):
    folder, run = trained
    sources = ["--heldout", folder / "data/heldout", "--recordings", CORPUS]
    done = titan_tts("evaluate", run.folder, *sources, "--sampling-steps=2", "--pictures=1")
    assert done.returncode == 0, done.stderr
    report = json.loads((run.folder / "samples/step-3/evaluation.json").read_text())
    rates = {name: rate["all"] for name, rate in report["word_error_rate"].items()}
    assert rates["recordings"] < 0.05 and rates["codec"] < 0.05
    # Speech after three steps is not intelligible.
    assert rates.keys() == {"recordings", "codec", "generated", "untrained"}
    assert len(list((run.folder / "samples/step-3").glob("*.wav"))) == report["utterances"] == 48
    assert len(list((run.folder / "samples/step-3").glob("*.png"))) == 4


@pytest.mark.slow
def test_commands_in_an_interpreter_of_their_own(trained):
    """As a user starts them: nothing is imported yet."""
    folder, run = trained
    out = folder / "own.wav"
    for arguments in (
        ["generate", run.folder, "--speaker=slt", "--text=one", "--sampling-steps=1", "--out", out],
        ["data", "inspect", folder / "data/train"],
        ["plan", runs.ROOT / "train_configs/dit_tts_800m.toml", "--gpus-per-node", "0"],
    ):
        command = [sys.executable, "-c", "import titan_tts; titan_tts.main()", *map(str, arguments)]
        done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True)
        assert done.returncode == (2 if "plan" in arguments else 0), done.stderr
        assert "Traceback" not in done.stderr
    assert soundfile.info(out).samplerate == 16000
