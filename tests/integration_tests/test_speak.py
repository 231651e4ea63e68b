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
    generate(run, "--speaker=slt", "--text=three one four", "--seconds=1.2", "--out", out)
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


DIGITS = "words:zero,one,two,three,four,five,six,seven,eight,nine"


def test_evaluate_reads_recordings_codec_and_untrained(trained):
    folder, run = trained
    sources = ["--test", folder / "data/heldout", "--recordings", CORPUS, "--recognizer", DIGITS]
    more = [
        "--speaker-scorer=own",
        "--sampling-steps=2",
        "--seeds=1",
        "--untrained",
        "--max-utterances=16",
    ]
    done = titan_tts("evaluate", run.folder, *sources, *more, "--on-page=2")
    assert done.returncode == 0, done.stderr
    out = run.folder / "evaluation/step-3-data-heldout"
    report = json.loads((out / "evaluation.json").read_text())
    figures = {row["name"]: row["figures"] for row in report["rows"]}
    # Speech after three steps is not intelligible.
    assert figures.keys() == {"recordings", "codec", "run@3", "untrained"}
    assert figures["recordings"]["wer"]["value"] < 0.05 and figures["codec"]["wer"]["value"] < 0.05
    voices = {name: row["speaker_similarity"]["value"] for name, row in figures.items()}
    assert -1 <= min(voices.values()) and max(voices.values()) <= 1
    assert "not independent" in report["scorers"]["speaker"]
    assert len(list((out / "wavs").rglob("*.wav"))) == 2 * len(report["utterances"]) == 2 * 16
    assert (out / "evaluation.html").read_text().count("<section>") == 2


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
