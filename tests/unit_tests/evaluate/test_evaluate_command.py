"""`titan-tts evaluate` from its arguments to its files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile

from tests.helpers.duration_recognizer import SPEAKER_SPEC, SPEC, DurationRecognizer
from tests.helpers.evaluated_run import (
    RATE,
    UTTERANCES,
    LengthCodec,
    evaluate,
    frames_of,
    set_up,
    write_tree,
)
from tests.helpers.row_model import CHANNELS
from titan_tts.evaluate import evaluate as evaluate_module
from titan_tts.evaluate.report import warnings
from titan_tts.speak import open_run
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.config import manager


@pytest.fixture
def tree(tmp_path, loaded, monkeypatch):
    set_up(monkeypatch, loaded)
    monkeypatch.chdir(tmp_path)
    return write_tree(tmp_path / "LibriTTS_R")


def test_perfect_transcripts_of_punctuation_and_numbers_have_no_errors(tree, capsys):
    scorers = ["--recognizer", SPEC, "--speaker-scorer", SPEAKER_SPEC]
    assert evaluate("run", "--test", tree, *scorers, "--out=out", "--language=en") == 0
    found = json.loads(Path("out/evaluation.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["recordings", "codec", "run@7"]
    rows = [row for row in found["utterances"] if row["speaker"] == "84"]  # the others: hostile
    assert [row["text"] for row in rows] == [text for _, text, _ in UTTERANCES[:3]]
    for row in rows:
        for scores in row["scores"].values():
            assert all(s["word_errors"] == 0 and s["words"] > 0 for s in scores), row
            assert all(0.5 < s["speaker_similarity"] <= 1 for s in scores)
    for row in found["rows"]:
        error = row["figures"]["duration_error"]
        assert (error is None) == (row["kind"] != "system")
        assert error is None or max(error.values()) < 1e-9
    assert found["rows"][0]["figures"]["pitch"]["value"] == pytest.approx(200, rel=0.02)
    assert found["rows"][2]["seeds"] == [0, 1]
    seconds = sum(map(frames_of, range(5))) / 25
    assert found["rows"][2]["real_time_factor"] == pytest.approx(0.5 / seconds)
    assert found["test"]["without_reference"] == 0 and found["differences"] == []
    table = capsys.readouterr().out
    assert "recordings" in table and "run@7" in table
    wavs = sorted(Path("out/wavs").rglob("*.wav"))
    assert len(wavs) == 2 * 5 and {path.parent.name for path in wavs} == {"seed-0", "seed-1"}
    assert soundfile.info(wavs[0]).samplerate == RATE


def test_a_recognizer_that_can_hears_several_sounds_of_a_language_at_once(tree, monkeypatch):
    """Each text is its sound's; systems speak in another order than the prompts."""
    heard = []

    def batch(recognizer, sounds, language):
        heard.append((len(sounds), language))
        return [(recognizer.transcribe(sound), language) for sound in sounds]

    wavs = sorted(tree.rglob("*.wav"))
    rows = [
        {"text": text, "speaker": "a", "audio": str(wav), "language": language}
        for wav, (_, text, _), language in zip(wavs, UTTERANCES, ("en", "de", "en", "en", "de"))
    ]
    Path("list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--test=list.jsonl", "--recognizer", SPEC, "--seeds=1"]
    monkeypatch.setattr(evaluate_module, "_HEARD_AT_ONCE", 3)
    assert evaluate("run", *arguments, "--out=alone") == 0
    monkeypatch.setattr(DurationRecognizer, "transcribe_batch", batch, raising=False)
    assert evaluate("run", *arguments, "--out=out") == 0
    alone, found = (json.loads(Path(f, "evaluation.json").read_text()) for f in ("alone", "out"))
    assert found["utterances"] == alone["utterances"]
    errors = [each["scores"]["recordings"][0]["word_errors"] for each in found["utterances"]]
    assert errors[1] == 2 and not any(errors[::2])  # "Mr." and "5" are read in English alone
    forwards, backwards = {(2, "en"), (1, "de")}, {(1, "en"), (1, "de"), (2, "en")}
    assert {*heard[:2]} == forwards and sum(n for n, _ in heard) == 3 * len(rows)
    assert len(heard) == 3 * 4 and {*heard} == forwards | backwards


def test_recordings_and_codec_without_a_run(tree, capsys, monkeypatch):
    opened = []

    def build(name, device):
        opened.append(name)
        return LengthCodec()

    monkeypatch.setattr(evaluate_module, "build_codec", build)
    arguments = ["--test", tree, "--recognizer", SPEC, "--speaker-scorer", SPEAKER_SPEC]
    for more in ([], ["--codec=of/mine"]):
        assert evaluate("none", *arguments, "--out=out", *more) == 0
    assert opened == ["mel_dct", "of/mine"]
    found = json.loads(Path("out/evaluation.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["recordings", "codec"]
    assert found["differences"] == []
    page = Path("out/evaluation.html").read_text()
    assert "Evaluation of recordings, codec" in page and "5 of 5" in page
    assert "noise seed" not in page
    refusals = [
        (["none", "run", "--out=x"], "none stands for a run"),
        (["none"], "--out is not given"),
    ]
    for given, sentence in refusals:
        assert evaluate(*given, "--test", tree, "--recognizer", SPEC) == 2
        assert sentence in capsys.readouterr().err


WORDS = "words:zero,one,two,three,four,five,six,seven,eight,nine"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--recognizer="], "--recognizer is not given"),
        ([f"--recognizer={WORDS}", "--out=out"], "cannot hear"),
        (["--seeds=0"], "--seeds = 0, but it must be from 1 to 100"),
        (["--recordings=/nowhere"], "/nowhere"),
        (["run@9"], "has no checkpoint step-9; it has steps: 5, 7"),
        (["./run"], "is given twice"),
        (["--out=/proc/x"], "--out"),
    ],
)
def test_mistakes_are_refused(tree, capsys, arguments, sentence):
    given = [] if "--recognizer" in arguments[0] else [f"--recognizer={SPEC}"]
    assert evaluate("run", *arguments, *given, "--test", tree) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not Path("out").exists()


def test_a_second_system_of_another_codec_is_refused(tree, capsys, monkeypatch):
    """Its folder tells nothing of its codec, which shows itself once it is loaded."""
    load = evaluate_module.load_synthesizer

    def load_other(options, run, **more):
        found = load(options, run, **more)
        other = replace(found.codec, fingerprint=f"codec of step {run.step}")
        return replace(found, codec=other)

    monkeypatch.setattr(evaluate_module, "load_synthesizer", load_other)
    arguments = ["--test", tree, "--recognizer", SPEC, "--seeds=1", "--on-page=0", "--out=out"]
    assert evaluate("a@7", "b@5", *arguments) == 2
    assert "b@5 has another codec than a@7; evaluate them separately" in capsys.readouterr().err
    found = json.loads(Path("out/evaluation.json").read_text())  # what was scored is not lost
    assert [row["name"] for row in found["rows"]] == ["recordings", "codec", "a@7"]


def test_a_later_run_that_was_trained_on_the_test_is_told(tree, loaded, monkeypatch, capsys):
    data = replace(loaded.config.data, path=["x", f"{tree}/a/../test-clean"])
    configs = {"a": loaded.config, "b": replace(loaded.config, data=data)}
    monkeypatch.setattr(manager, "load_run_config", lambda folder, args: configs[folder.name])
    arguments = ["--test", tree / "test-clean", "--recognizer", SPEC, "--seeds=1", "--on-page=0"]
    warning = "warning: a system was trained on these utterances"
    for systems, told in ((["a@5", "a@7"], False), (["a@7", "b@5"], True)):
        assert evaluate(*systems, *arguments, "--out=out") == 0
        assert (warning in capsys.readouterr().err) is told


@pytest.mark.long
def test_what_systems_learned_from_is_told_by_latents_or_said_to_be_unknown(
    tree, loaded, monkeypatch, capsys
):
    """Copies are found by their latents. Of an exported folder, or a run whose data are missing, it is not known."""
    same = {"channels": CHANNELS, "frames": lambda _: frames_of(0)}
    for seed, name in enumerate(("train", "heldout", "more")):
        make_shards(name, 4, seed, **same)
    shutil.copytree("more", "copied")
    own = {"run": ["train", "more"], "moved": ["gone"], "far": ["train", "http://x/more"]}
    configs = {
        name: replace(loaded.config, data=replace(loaded.config.data, path=path))
        for name, path in own.items()
    }
    monkeypatch.setattr(manager, "load_run_config", lambda folder, args: configs[folder.name])
    monkeypatch.setattr(open_run, "load_run_config", lambda folder, args: configs[folder.name])
    Path("made").mkdir()
    codec = {"kind": "", "name": "", "fingerprint": ""}
    about = {"format": "titan-tts", "version": 1, "step": 3, "weights": "ema", "codec": codec}
    Path("made/config.json").write_text(json.dumps({**about, "audio": {}, "config": {}}))
    Path("made/model.safetensors").touch()
    configs["made"] = configs["run"]
    memory, unknown = "was trained on these utterances", "learned from is not known here"
    for test, systems, told in (
        ("copied", ["run@7"], [memory]),
        ("heldout", ["run@7", "moved@7"], [f"what moved@7 {unknown}"]),
        ("heldout", ["run@7"], []),
        ("copied", ["made", "run@7", "far@7"], [memory, f"what made@3:ema, far@7 {unknown}"]),
    ):
        arguments = ["--test", test, "--recognizer", SPEC, "--seeds=1", "--on-page=0", "--out=out"]
        assert evaluate(*systems, *arguments) == 0
        said = "".join(capsys.readouterr())
        assert all(sentence in said for sentence in told)
        assert said.count(memory) + said.count(unknown) == len(told)


def test_warnings_of_what_figures_do_not_say():
    test = {"source": "t", "utterances": 5, "left_out": {"silent": 2, "undecodable": 1}}
    test |= {"without_reference": 3, "without_recording": 4, "is_training_data": True}
    found = {"test": test, "unfit_recognizer": "it is unfit", "void": {}}
    words = [
        "2 silent, 1 undecodable",
        "3 utt",
        "4 utt",
        "trained on these",
        "it is unfit",
    ]
    said = warnings(found)
    assert all(each in sentence for each, sentence in zip(words, said, strict=True))
    test |= {"left_out": {}, "without_reference": 0, "is_training_data": False}
    assert len(warnings(found | {"unfit_recognizer": ""})) == 1
    test["without_recording"] = 5  # none has one: a row less is no surprise
    assert warnings(found | {"unfit_recognizer": ""}) == []


def test_where_an_evaluation_is_written(tree, tmp_path):
    arguments = ["--test", tree / "test-clean", "--recognizer", SPEC, "--seeds=1", "--on-page=0"]
    one = tmp_path / "runs/a/evaluation/step-7-LibriTTS_R-test-clean/evaluation.json"
    mine = one.with_name("wavs") / "mine.wav"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert evaluate("runs/a", *arguments) == 0
    assert mine.exists()  # no evaluation has written it
    rows = json.loads(one.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["recordings", "codec", "system"]
    more = ["--seed=3", "--max-utterances=4", "--batch-size=3"]
    assert evaluate("runs/a", *arguments, *more, "--seeds=2") == 0
    assert not mine.exists()
    assert {path.name for path in one.parent.glob("wavs/*/*")} == {"seed-3", "seed-4"}
    found = json.loads(one.read_text())
    assert found["test"]["utterances"] == len(found["utterances"]) == 4
    assert (found["rows"][2]["seeds"], found["rows"][2]["batch_size"]) == ([3, 4], 3)
    assert found["options"]["seeds"] == 2 and found["scorers"]["speaker"] is None
    assert evaluate("runs/a@7:raw", "runs/b@5", *arguments) == 0
    several = tmp_path / "runs/evaluation-LibriTTS_R-test-clean-a_7_raw-b_5/evaluation.json"
    found = json.loads(several.read_text())["rows"][2:]
    assert [(row["name"], row["weights"], row["step"]) for row in found] == [
        ("a@7:raw", "raw", 7),
        ("b@5", "ema", 5),
    ]
