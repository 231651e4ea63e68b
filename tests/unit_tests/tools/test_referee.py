"""The referee's own logic: which texts are said, and what is made of an evaluation, which here has stubs for its scorers."""

import json
from pathlib import Path

import pytest

from benchmarks import referee
from tests.helpers.duration_recognizer import SPEAKER_SPEC, SPEC
from tests.helpers.evaluated_run import UTTERANCES, set_up, write_tree
from tests.helpers.sampled_run import loaded, shards  # noqa: F401
from tests.helpers.sentences import refused

SCORERS = [f"--recognizer={SPEC}", f"--speaker-scorer={SPEAKER_SPEC}", "--opinion="]
LISTS = """# Harvard sentences of the IEEE
List 1
1. The birch canoe slid on smooth planks.
 12) Time brings us many changes.

H2 Harvard Sentences
Two plus seven is less than ten.
"""
SENTENCES = {
    "The birch canoe slid on smooth planks.",
    "Time brings us many changes.",
    "Two plus seven is less than ten.",
}


@pytest.fixture
def tree(tmp_path, loaded, monkeypatch):  # noqa: F811
    set_up(monkeypatch, loaded)
    monkeypatch.chdir(tmp_path)
    return write_tree(tmp_path / "tree")


def write_list(path: Path, tree: Path) -> str:
    """Writes a list of the tree's recordings, with paths relative to the list."""
    lines = []
    for number, (speaker, text, _) in enumerate(UTTERANCES):
        wav = tree / f"test-clean/{speaker}/7/{speaker}_7_{number:06d}_000000.wav"
        row = {"text": text, "speaker": speaker, "audio": str(wav.relative_to(path.parent))}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_texts_are_chosen_by_what_they_say():
    texts = [f"sentence {number}" for number in range(50)]
    chosen = {texts[i] for i in referee.choose(texts, 20, 0)}
    turned = texts[::-1]
    assert chosen == {turned[i] for i in referee.choose(turned, 20, 0)} and len(chosen) == 20
    assert chosen != {texts[i] for i in referee.choose(texts, 20, 1)}
    assert referee.choose(texts, 0, 0) == referee.choose(texts, 99, 3) == list(range(50))


def test_two_runs_on_a_list_and_on_a_tree(tree, tmp_path, capsys):
    given = ["--list", write_list(tmp_path / "said.jsonl", tree), str(tree)]
    arguments = ["run@7", "run@5", *given, *SCORERS, "--texts=0", "--seeds=2", "--out=out"]
    assert referee.main(arguments) == 0
    found = json.loads(Path("out/referee.json").read_text())
    assert list(found["sets"]) == ["said", "tree"] and found["settings"]["seeds"] == 2
    for each in found["sets"].values():
        rows = {row["name"]: row for row in each["rows"]}
        assert list(rows) == ["recordings", "codec", "run@7", "run@5"]
        assert rows["recordings"]["more_words_wrong"] is None and "run" not in rows["run@5"]
        assert rows["run@7"]["more_words_wrong"]["value"] == 0
        assert rows["run@5"]["more_words_wrong"]["value"] > 0  # it says another text twice
        dog = next(each for each in each["transcripts"] if "dog" in each["text"])
        assert dog["run@7"] == [UTTERANCES[1][2]] * 2
        assert dog["run@5"] == [UTTERANCES[2][2], UTTERANCES[1][2]]
    for name in ("said", "tree"):
        assert "of 5" in Path(f"out/{name}/evaluation.html").read_text()
    table = Path("out/referee.md").read_text()
    assert [table.count(f"| {name} (5) | run@5 | ") for name in ("said", "tree")] == [1, 1]
    assert capsys.readouterr().out.endswith(f"{table}\n")
    assert referee.main(["--report", "out/referee.json"]) == 0
    assert capsys.readouterr().out == f"{table}\n"


def test_flite_says_the_same_sentences_in_each_voice(tree, tmp_path, monkeypatch):
    flite = tmp_path / "bin/flite"
    flite.parent.mkdir()
    wav = tree / "test-clean/9/7/9_7_000004_000000.wav"
    flite.write_text(f'#!/bin/sh\n[ "$2" = mute ] || cp {wav} "$6"\n')
    flite.chmod(0o755)
    monkeypatch.setenv("PATH", f"{flite.parent}:/usr/bin:/bin")
    Path("lists.txt").write_text(LISTS)
    given = ["--harvard=lists.txt", *SCORERS, "--texts=2", "--out=out"]
    assert referee.main(["run@7", *given, "--voices", "slt", "rms"]) == 0
    sets = json.loads(Path("out/referee.json").read_text())["sets"]
    assert list(sets) == ["harvard-slt", "harvard-rms"]
    said = {name: [each["text"] for each in found["transcripts"]] for name, found in sets.items()}
    assert said["harvard-slt"] == said["harvard-rms"] and set(said["harvard-slt"]) < SENTENCES
    assert {each["speaker"] for each in sets["harvard-rms"]["transcripts"]} == {"rms"}
    refused(lambda: referee.main(["run@7", *given, "--voices=mute"]), "--voices mute", "flite -lv")


def test_more_words_wrong_than_the_first_row():
    """By hand: 7 of 20 words over two seeds, of the recordings 1 of 10."""
    scores = [((1, 4), (2, 4), (3, 4)), ((0, 6), (1, 6), (1, 6))]
    utterances = [
        {"scores": {"recordings": [first], "run": more}}
        for first, *more in [[{"word_errors": e, "words": w} for e, w in each] for each in scores]
    ]
    found = referee.more_words_wrong(utterances, "run", "recordings")
    assert found["value"] == pytest.approx(0.25) and found["low"] <= 0.25 <= found["high"]


def test_what_is_said_must_be_given(tree, tmp_path):
    Path("bad.jsonl").write_text('{"text": "Yes.", "audio": "a.wav"}\n{"text": 3}')
    bad = ["--list", "bad.jsonl", *SCORERS]
    refused(lambda: referee.main(["run@7", *bad]), "bad.jsonl line 2: is not an object")
    refused(lambda: referee.main(["run@7"]), "--list or --harvard is needed")
    lists = ["--list", "a/said.jsonl", "b/said.jsonl"]
    refused(lambda: referee.main(["run@7", *lists]), "two sets have one name")
    (tmp_path / "empty.txt").write_text("List 1\n")
    refused(lambda: referee.main([f"--harvard={tmp_path / 'empty.txt'}"]), "has no sentence")
