"""`titan-tts collect`: texts stand with their audio, a second run adds what is new, and what is refused."""

import json
import shutil
import threading

import numpy as np
import pytest
import soundfile
from filelock import FileLock

from tests.helpers.collecting import COUNT, STAND_IN, read_rows, seconds, tree
from tests.helpers.speech_corpora import CHANNELS, prepare
from titan_tts import cli
from titan_tts.collect import collection, sources
from titan_tts.collect.collection import edited, write_collection
from tools.harness import stand_in_analyzer
from tools.harness.stand_in_analyzer import RATE, text_of, write_recordings
from torchtitan.models.dit_tts import errors
from torchtitan.models.dit_tts.data.dataset import open_dataset


def test_every_text_stands_with_its_own_audio(source, output, collect, tmp_path, capsys):
    assert collect(source, output) == 0
    rows = read_rows(output)
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    assert len(rows) == sum(seconds(path) for path in source.glob("*.wav"))
    for row in rows:
        stored, rate = soundfile.read(output / row["audio"], dtype="float32")
        assert (rate, row["text"], row["text_verbatim"]) == (RATE, *[text_of(stored)] * 2)
        original, _ = soundfile.read(source / row["source"], dtype="float32")
        part = original[round(row["start"] * RATE) : round(row["stop"] * RATE)]
        assert text_of(part) == row["text"]
    # The four loudnesses are four speakers, whose largest is the first.
    voices = {row["speaker"]: int(row["source"][:3]) % 4 for row in rows}
    assert len(voices) == len(set(voices.values())) == 4
    counts = [sum(row["speaker"] == f"s{n:04d}" for row in rows) for n in range(1, 5)]
    assert counts == sorted(counts, reverse=True)
    said = " ".join(capsys.readouterr().out.split())
    hours = f"{sum(row['stop'] - row['start'] for row in rows) / 3600:.2f}"
    for words in ("recordings 6 of 6", f"segments {len(rows)} ", f"hours kept {hours} "):
        assert words in said
    page = (output / "report.html").read_text()
    assert ">6 of 6</b>" in page and "s0004" in page
    prepare(output / "collection.jsonl", tmp_path / "data")
    dataset = open_dataset([str(tmp_path / "data/train")], CHANNELS)
    samples = {each["id"]: each for each in dataset.metadata_of(range(len(dataset)))}
    assert len(samples) == len(rows)
    for row in rows:
        row = {name: value for name, value in row.items() if value is not None}
        assert row.items() <= samples[row["id"]].items()


def test_a_second_run_adds_what_is_new_and_leaves_out_what_was_edited(
    source, output, collect, capsys
):
    collect(source, output)
    before, files = {row["id"]: row for row in read_rows(output)}, tree(output / "files")
    write_recordings(source / "more", 2, seed=1)
    shutil.copy(source / "000.wav", source / "copy.wav")
    old, rate = soundfile.read(source / "001.wav")
    soundfile.write(source / "001.wav", old[::-1], rate)
    capsys.readouterr()
    assert collect(source, output) == 0
    after = {row["id"]: row for row in read_rows(output)}
    gone = {row["id"] for row in before.values() if row["source"] == "001.wav"}
    assert gone and before.keys() - after.keys() == gone
    new = {"more/000.wav", "more/001.wav"}
    assert {row["source"] for row in after.values()} == {f"{n:03d}.wav" for n in range(COUNT)} | new
    assert "8 different recordings, 3 of them new" in capsys.readouterr().out
    # Nothing that was there is touched, and speakers keep their names.
    assert files.items() <= tree(output / "files").items()
    for name in before.keys() & after.keys():
        assert after[name]["speaker"] == before[name]["speaker"]
    collect(source / "m*/*.wav", output)
    assert read_rows(output) == list(after.values())
    collect(source / "m*/*.wav", output, "--prune")
    assert {row["source"] for row in read_rows(output)} == new


def test_a_name_that_source_has_now_is_preferred(source, output, collect):
    collect(source, output)
    shutil.move(source, source.with_name("y"))
    collect(source.with_name("y") / "..", output)  # which the output is inside of, too
    assert {f"y/{n:03d}.wav" for n in range(COUNT)} == {row["source"] for row in read_rows(output)}


def test_speakers_are_found_anew_by_another_threshold(source, output, collect, monkeypatch):
    """And what lies in files/ stays as it is."""
    collect(source, output)
    files = tree(output / "files")

    def one_speaker(vectors, owners, lengths, threshold, known, highest):
        assert threshold == 0.05 and lengths.tolist() == [1.0] * len(vectors)
        assert len({*owners.tolist()}) == COUNT and highest == 4
        return np.ones(len(vectors), int)

    monkeypatch.setattr("titan_tts.collect.speakers.cluster", one_speaker)
    assert collect(source, output, "--speaker-threshold=0.05") == 0
    assert {row["speaker"] for row in read_rows(output)} == {"s0001"}
    assert tree(output / "files") == files


def test_other_settings_and_foreign_folders_are_refused(source, output, collect, tmp_path, capsys):
    (source / "no.wav").write_bytes(b"no audio")
    assert collect(source / "no.wav", output, "--max-seconds", "20") == 1
    assert collect(source, output) == 1  # what has failed holds no settings
    assert "no.wav: the file is text, not audio" in capsys.readouterr().out
    (source / "no.wav").unlink()
    assert collect(source, output) == 0

    def error(*arguments: object) -> str:
        assert collect(*arguments) == 2
        return capsys.readouterr().err

    said = error(source, output, "--max-seconds", "20", "--analyzer", f"{STAND_IN}:1")
    assert f"analyzer was '{STAND_IN}', is '{STAND_IN}:1'; max_seconds was 30.0, is 20.0" in said
    record = json.loads((output / "collect.json").read_text())
    record["settings"]["batch_size"] = 2  # of an earlier version, and decided nothing
    (output / "collect.json").write_text(json.dumps(record))
    assert collect(source, output) == 0
    assert "and no collect.json" in error(source, source)
    # Its names become paths, and the folder may be a stranger's.
    for change in (
        {"format": 2},
        {"files": 1},
        {"files": {"../../elsewhere": "a.wav"}},
        {"files": {"0" * 16: 5}},
        {"settings": {"speaker_threshold": "high"}},
    ):
        (output / "collect.json").write_text(json.dumps(record | change))
        assert "collect.json" in error(source, output)
        assert cli.main(["annotate", str(output)]) == 2
        assert "collect.json" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert "cannot be written" in error(source, tmp_path / "file" / "out")


def test_a_model_that_cannot_be_opened_is_told_before_recordings_are_read(
    source, output, collect, monkeypatch, tmp_path, capsys
):
    (tmp_path / "encoder_of_mine.py").write_text("import not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "content_id", lambda path: pytest.fail("read"))
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "resemblyzer" else 1)
    others = {"--speaker-encoder": "json:loads", "--recognizer": "json:loads", "--analyzer": ""}
    for option, value, words in (
        ("--speaker-encoder", "resemblyzer", "pip install --no-deps resemblyzer"),
        ("--speaker-encoder", "encoder_of_mine:Voices", "No module named 'not_there'"),
        ("--recognizer", "whisperr", "'whisperr' names no model"),
        ("--analyzer", "not_there:mine", "No module named 'not_there'"),
    ):
        given = [part for pair in (others | {option: value}).items() for part in pair]
        assert collect(source, output, *given) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--recognizer", "--verbatim-recognizer"])
def test_a_model_that_the_hub_does_not_give_is_told_once(
    source, output, collect, monkeypatch, capsys, option
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("titan_tts.jobs.engines.open_engine", lambda *a, **k: pytest.fail("works"))
    models = {"--speaker-encoder": "json:loads", "--recognizer": "json:loads", "--analyzer": ""}
    models[option] = "whisper:nobody/none"
    assert collect(source, output, *(part for pair in models.items() for part in pair)) == 2
    errors = capsys.readouterr().err
    assert errors.count("cannot be reached") == 1 and "whisper-tiny.en, for English" in errors


def test_any_text_is_one_line(source, output, collect, monkeypatch):
    text = 'a\u2028b\x85c\x1c"\r\n\ud7ff \U0001f600'
    monkeypatch.setattr(stand_in_analyzer, "text_of", lambda waveform: text)
    assert collect(source, output) == 0
    lines = (output / "collection.jsonl").read_bytes().split(b"\n")[:-1]
    assert {json.loads(line)["text"] for line in lines} == {text}


def test_speakers_that_are_rejected_or_come_back_keep_their_names(
    source, output, collect, monkeypatch
):
    def collected(*numbers: int) -> dict[str, str]:
        listed = source / "list.txt"
        listed.write_text("".join(f"{number:03d}.wav\n" for number in numbers))
        assert collect(listed, output, "--prune") == 0
        return {row["source"]: row["speaker"] for row in read_rows(output)}

    first = collected(0, 1, 2)
    assert sorted(first.values()) == ["s0001", "s0002", "s0003"]
    rejected = {row["id"]: None for row in read_rows(output) if row["speaker"] == "s0003"}
    with monkeypatch.context() as patch:
        patch.setattr(collection, "annotations", lambda folder: rejected)
        assert len({row["speaker"] for row in write_collection(output)}) == 2
        assert "s0004" in collected(0, 1, 2, 3).values()
    assert collected(0, 3) == {"000.wav": first["000.wav"], "003.wav": "s0004"}
    assert collected(0, 1, 2, 3) == first | {"003.wav": "s0004"}


def test_one_at_a_time_makes_the_collection(source, output, collect):
    collect(source, output)
    (output / "collection.jsonl").unlink()
    making = threading.Thread(target=write_collection, args=(output,))
    with FileLock(output / ".collection.lock"):
        making.start()
        making.join(0.3)
        assert making.is_alive() and not (output / "collection.jsonl").exists()
    making.join(60)
    assert len(read_rows(output)) > COUNT


def test_annotations_change_their_own_rows_and_nothing_else(source, output, collect, monkeypatch):
    collect(source, output)
    rows = read_rows(output)
    changed, rejected = rows[2]["id"], rows[5]["id"]
    edit = {"annotated": True, "text": "Mended at last.", "text_verbatim": "uh mended"}
    edits = {changed: edit, rejected: None, "0-0-0": edit}  # the last one's file was edited
    monkeypatch.setattr(collection, "annotations", lambda folder: edits)
    made = write_collection(output)
    assert made == read_rows(output) and len(made) == len(rows) - 1
    for row in made:
        before = next(each for each in rows if each["id"] == row["id"])
        # 15 characters in a second, confirmed.
        new = {"chars_per_second": 15.0, "agreement": None, "quality": "high"} | edit
        assert row == (before | new if row["id"] == changed else before)
    monkeypatch.setattr(collection, "annotations", lambda folder: {})
    assert write_collection(output) == rows  # an undo brings all back
    [short] = edited([rows[2]], {changed: edit | {"text": "No."}})
    assert (short["chars_per_second"], short["quality"]) == (3.0, "medium")


def test_captions_are_made_of_the_figures_and_those_of_people_stay(source, output, collect):
    collect(source, output)
    first = read_rows(output)
    assert {row["caption"] for row in first} == {"a voice"} and {"pitch", "bandwidth"} <= {
        *first[0]
    }
    # A folder of an earlier version, and others that speak faster and through noise.
    for number, path in enumerate(sorted(output.glob("files/*/segments.jsonl"))):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record |= {"chars_per_second": 10.0 + number, "snr_db": 10.0, "loudness": -9.0 * number}
            if number == 0:
                record.pop("pitch"), record.pop("bandwidth")
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = write_collection(output)
    noise = "with some background noise"
    assert rows[0]["pitch"] is None and rows[0]["caption"] == f"a voice, speaking slowly, {noise}"
    assert rows[-1]["caption"] == f"a voice, speaking fast, {noise}"
    rows[0]["caption"], rows[-1]["caption"] = "by a person", ""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (output / "collection.jsonl").write_text(lines)
    assert collect(source, output) == 0
    assert read_rows(output) == rows
    (output / "collection.jsonl").write_text(lines + "[]\n")
    with pytest.raises(errors.InputError, match="collection.jsonl cannot be read .*made anew"):
        write_collection(output)
