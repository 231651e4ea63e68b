"""`titan-tts finetune`: from a run and recordings to a run of their voice and a comparison, in one command."""

import json
import os
import signal
import sys
import tomllib

import numpy as np
import pytest
import soundfile

from tests.helpers.pages import check_offline
from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import write_resemblyzer
from tests.helpers.speech_corpora import tone
from titan_tts import cli
from titan_tts.finetune import finetune_command
from titan_tts.finetune.finetune_command import OF_FINETUNE, Options, run
from tools.harness import runs
from tools.harness.forked import start_titan_tts, titan_tts
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts import errors
from torchtitan.models.dit_tts.text.durations import stored_durations

WORDS = "words:zero,one,two,three,four,five,six,seven,eight,nine,ten"


def read_config(folder):
    return tomllib.loads((folder / "config.toml").read_text())


@pytest.fixture
def finetune(monkeypatch, capsys):
    """The command in this process, whose trainings are forked: (status, output)."""

    def step(*arguments):
        print("$ titan-tts", *arguments)
        monkeypatch.setenv(OF_FINETUNE, "1")
        if arguments[0] == "train":
            done = titan_tts(*arguments)
            print(done.stdout, done.stderr)
            status = done.returncode
        else:
            status = cli.main([*arguments])
        monkeypatch.delenv(OF_FINETUNE)
        if status:
            raise finetune_command._Ended(status)

    def call(*arguments):
        status = cli.main(["finetune", *map(str, arguments)])
        return status, "".join(capsys.readouterr())

    monkeypatch.setattr(finetune_command, "_titan_tts", step)
    return call


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_shards(folder / "data", 24)
    more = [f"--data.path={folder / 'data'}", "--training.steps=2", "--optimizer.lr=0.01"]
    # With a vocabulary that lacks the recordings' letters.
    more += ["--encoder.model=chars", "--ema.decays=0.9", "--data.max_frames=256"]
    return runs.run(folder, "run", [*runs.TINY, *more], 1).folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    lines = []
    for number in range(13):
        sound = tone(1.0 + 0.1 * number, hertz=200 + 50 * number)
        noise = 0.01 * np.random.default_rng(number).standard_normal(len(sound))
        soundfile.write(folder / f"{number}.wav", sound + noise, 16_000)
        text = ("Ten seven", "three ten", "one")[number % 3]
        row = {"audio": f"{number}.wav", "text": text, "annotated": number < 12}
        lines.append(json.dumps(row))
    (folder / "list.jsonl").write_text("\n".join(lines))
    return folder / "list.jsonl"


def test_from_recordings_to_a_comparison(base, recordings, tmp_path, monkeypatch, finetune):
    out, packages = tmp_path / "out", str(write_resemblyzer(tmp_path / "packages"))
    monkeypatch.setattr(sys, "path", [packages, *sys.path])
    arguments = [base, recordings, out, "--speaker=me", "--language=en", "--where=annotated=true"]
    arguments += ["--steps=4", "--training.mixed_precision_param=float32"]
    status, said = finetune(*arguments)
    assert status == 0, said
    assert "--overwrite" not in said and "titan-tts train small" not in said
    assert "not compared: give --recognizer" in said and "train on: 4 steps" in said
    assert f"speak:   titan-tts generate {out / 'run'} --step best --speaker me --text" in said
    config = read_config(out / "run")
    assert config["optimizer"]["lr"] == pytest.approx(0.001) and config["training"]["steps"] == 4
    assert "new for the weights" in said and "'T'" in said and "but rare ones" in said
    samples = json.loads((out / "data/prepare.json").read_text())["summary"]
    heldout = samples["heldout"]["samples"]
    assert (samples["train"]["samples"], heldout) == (8, 4)  # a third of less than 15
    first = (out / "run/metrics.jsonl").read_text()
    # The base's voices keep their pace beside the new one.
    before, after = stored_durations(base), stored_durations(out / "run")
    assert "me" in after.speaker_scale and len(before.speaker_scale) > 1
    for name in before.speaker_scale:
        for text in ("the", "an old voice"):
            assert after.estimate(text, name) == pytest.approx(before.estimate(text, name), rel=0.1)
    # The same command does only what is missing: the comparison, here with held-out data of the base, too.
    data = base.parent / "data"
    compared = [f"--recognizer={WORDS}", f"--keep-test={data}", "--max-utterances=2"]
    status, said = finetune(*arguments, *compared)
    assert status == 0, said
    assert (out / "run/metrics.jsonl").read_text() == first
    for name in ("evaluation", "forgotten"):
        found = json.loads((out / name / "evaluation.json").read_text())
        assert found["test"]["utterances"] == 2
        kinds = [row["kind"] for row in found["rows"]]
        has_recordings = ["recordings"] * (name == "evaluation")
        assert kinds == [*has_recordings, "codec", "system", "system"]
        assert found["rows"][-2]["name"].startswith("base")
        assert np.isfinite(found["rows"][0]["figures"]["wer"]["value"])
        heard_by = found["scorers"]["speaker"], found["scorers"]["pitch"]
        assert heard_by == ("voice encoder of Resemblyzer", "SwiftF0")
        assert found["rows"][0]["figures"]["speaker_similarity"] is not None
    page = (out / "comparison.html").read_text()
    assert page.count("<audio") == 2 * 2 * 2  # of each set two texts by both
    assert "The new recordings" in page and "What the base could say before" in page
    check_offline(page)
    # Half of the samples are the base's, from prepared shards and an exported model.
    again = [out / "base", out / "data", tmp_path / "kept", f"--keep={data}", "--steps=1"]
    again += ["--training.mixed_precision_param=float32", "--data.max_dropped_fraction=1"]
    status, said = finetune(*again)
    assert status == 0, said
    assert read_config(tmp_path / "kept/run")["data"]["weights"] == [1.0, 1.0]


@pytest.mark.parametrize("package", ["resemblyzer", "swift_f0"])
def test_what_compares_is_there_before_anything_is_trained(tmp_path, monkeypatch, package):
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else find(name))
    options = Options("no base", "no recordings", str(tmp_path / "out"), recognizer=WORDS)
    refused(lambda: run(options), f"{package} is not installed; run: pip install")


def test_a_step_that_fails_ends_the_command(base, tmp_path, finetune):
    def fails(base, recordings, out, *more):
        status, said = finetune(base, tmp_path / recordings, tmp_path / out, *more)
        assert status == 2 and not (tmp_path / out / "run").exists(), said
        return said

    row = json.dumps({"audio": "no.wav", "text": "one", "speaker": "me"})
    (tmp_path / "list.jsonl").write_text(row)
    said = fails(base, "list.jsonl", "out")
    assert "$ titan-tts prepare" in said and "list.jsonl" in said
    said = fails(base, "list.jsonl", "new", "--keep=nowhere")
    assert "nowhere" in said and "$" not in said
    (tmp_path / "prepare.json").write_text("{}")
    assert "prepare.json is not a record of titan-tts prepare" in fails(base, "", "new")
    for given in ("--where=annotated=true", "--speaker=me"):
        assert f"{given.partition('=')[0]} is for recordings" in fails(base, "", "new", given)


def test_a_stop_is_passed_on_and_nothing_is_lost(base, recordings, tmp_path):
    out, log, errors = tmp_path / "out", tmp_path / "log", tmp_path / "errors"
    arguments = [base, recordings, out, "--speaker=me", "--steps=100000", "--metrics.log_freq=1"]
    more = ["--training.mixed_precision_param=float32", "--validation.freq=100000"]
    command = start_titan_tts("finetune", *arguments, *more, log=log, errors=errors)
    try:
        metrics = out / "run/metrics.jsonl"
        runs.wait_until(lambda: metrics.is_file() and metrics.read_text(), 120, errors.read_text)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(60) == 143
    finally:
        command.kill()
    state = json.loads((out / "run/state.json").read_text())
    assert state["state"] == "preempted"
    [saved] = [path.name for path in (out / "run/checkpoint").glob("step-*")]
    assert int(saved.removeprefix("step-")) >= 1
