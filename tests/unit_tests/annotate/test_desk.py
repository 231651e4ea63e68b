"""Which segment comes next, and what is kept of the decisions."""

import json
import sqlite3
from contextlib import closing

import pytest

from tests.helpers.collected import FILE, segment_id, write_collected, write_list
from tests.helpers.sentences import refused
from titan_tts.annotate import annotate_command
from titan_tts.annotate.annotate_command import Options
from titan_tts.annotate.app import differences
from titan_tts.annotate.segments import Desk, read_segments, write_annotated
from titan_tts.annotate.store import annotations, database_path
from titan_tts.collect.collection import write_collection


@pytest.fixture
def folder(tmp_path):
    return write_collected(tmp_path / "out", [0.9, 0.2, 1.0, 0.2, 0.5])


def opened(folder):
    return Desk(database_path(folder), read_segments(folder))


def test_the_least_agreement_comes_first_then_the_id_and_skipped_ones_last(folder):
    desk, seen = opened(folder), []
    order = [*map(segment_id, (1, 3, 4, 0, 2))]
    for _ in range(7):
        seen.append(desk.next().id)
        assert desk.next().id == seen[-1]  # a page is loaded again
        desk.judge(seen[-1], "skip", "", None)
    assert seen == order + order[:2] and annotations(folder) == {}
    for again in (desk, opened(folder)):
        assert again.next().id == order[2]
    for each in order[2:]:
        assert desk.next().id == each
        desk.judge(each, "accept", "yes", None)
    again = opened(folder)
    assert again.next().id == order[0] and again.progress()["done"] == 3
    for each in order[:2]:
        again.judge(each, "reject", "", None)
    assert again.next() is opened(folder).next() is None
    assert again.progress() == {"done": 5, "rejected": 2, "all": 5} | dict.fromkeys(
        ("hours", "hours_done"), pytest.approx(5 * 0.5 / 3600)
    )


def test_of_what_several_people_decided_the_newest_counts(folder):
    """As in a database of an earlier version, which kept their names."""
    desk, ids = opened(folder), [*map(segment_id, range(5))]
    rows = [
        *[("ann", ids[0], "accept", "one"), ("bob", ids[0], "reject", None)],
        *[("bob", ids[1], "reject", None), ("ann", ids[1], "accept", "two")],
        *[("bob", ids[1], "skip", None), ("ann", ids[2], "accept", "three")],
        *[("bob", ids[2], "accept", "3"), ("bob", ids[2], "undo", None), ("ann", ids[3], "skip", None)],
    ]  # fmt: skip
    with sqlite3.connect(database_path(folder)) as connection:
        for who, segment, action, text in rows:
            values = segment, who, 1.0, action, text, desk.segments[segment].place
            connection.execute("INSERT INTO edits VALUES (NULL, ?, ?, ?, ?, ?, NULL, ?)", values)
    two, three = ({"annotated": True, "text": text} for text in ("two", "three"))
    assert annotations(folder) == {ids[0]: None, ids[1]: two, ids[2]: three}
    desk = opened(folder)
    assert desk.progress()["done"] == 3
    assert [desk.undo()[0].id for _ in range(3)] == [ids[3], ids[2], ids[1]]
    assert annotations(folder) == {ids[0]: None, ids[1]: two}
    desk.judge(ids[0], "accept", "one", None)  # as the first of its decisions, not as the last
    assert annotations(folder)[ids[0]] == {"annotated": True, "text": "one"}


def test_undo_is_another_row_and_brings_the_segment_back(folder):
    desk = opened(folder)
    a, b = segment_id(1), segment_id(3)
    desk.judge(a, "accept", "one", "uh one")
    desk.judge(a, "accept", "one", "uh one")  # the page sent it twice
    desk.judge(b, "reject", "two", "uh two")
    kept = {"annotated": True, "text": "one", "text_verbatim": "uh one"}
    assert annotations(folder) == {a: kept, b: None}
    segment, undone = desk.undo()
    assert (segment.id, undone.action, undone.text) == (b, "reject", "two")
    assert annotations(folder) == {a: kept} and desk.next().id == b
    known = {"done": 1, "rejected": 0, "all": 5, "hours": 2.5 / 3600, "hours_done": 0.5 / 3600}
    assert desk.progress() == pytest.approx(known)
    desk.judge(b, "skip", "", None)
    assert desk.next().id == segment_id(4) and desk.undo()[0].id == desk.next().id == b
    assert opened(folder).undo()[0].id == a and annotations(folder) == {}
    refused(lambda: opened(folder).undo(), "nothing to undo")
    with sqlite3.connect(database_path(folder)) as connection:
        actions = [row[0] for row in connection.execute("SELECT action FROM edits ORDER BY id")]
        assert actions == ["accept", "reject", "undo", "skip", "undo", "undo"]


def test_differences_are_of_words_and_not_of_case_or_points():
    first, second = differences("So, it's two I think.", "so it's too I I think")
    assert first == [("So, it's", False), ("two", True), ("I think.", False)]
    assert second == [("so it's", False), ("too I", True), ("I think", False)]
    assert differences("你好吗", "你好") == ([("你好", False), ("吗", True)], [("你好", False)])


def test_a_list_keeps_the_rows_that_nobody_judged_byte_for_byte(tmp_path):
    path = write_list(tmp_path, 4, note=["ü"], duration=0.5)
    path.write_bytes(path.read_bytes().replace(b"\n", b" \r\n").rstrip())
    before = path.read_bytes().splitlines(keepends=True)
    desk = opened(path)
    desk.judge("k1", "accept", "größer", None)
    desk.judge("k2", "reject", "", None)
    assert write_annotated(path) == tmp_path / "list.annotated.jsonl"
    first, second, last = (tmp_path / "list.annotated.jsonl").read_bytes().splitlines(True)
    assert (first, last) == (before[0], before[3]) and path.read_bytes() == b"".join(before)
    changes = {"text": "größer", "annotated": True}
    assert json.loads(second) == json.loads(before[1]) | changes and second.endswith(b"}\r\n")
    assert desk.progress()["hours"] == pytest.approx(2 / 3600)


def test_a_text_never_comes_to_other_audio(tmp_path, capsys):
    path = write_list(tmp_path, 4)
    desk, content = opened(path), path.read_text()
    for number in range(3):
        desk.judge(f"k{number}", "accept", f"heard {number}", None)
    # The audio of k1 and k2 is swapped.
    swap = {"1.wav": "2.wav", "2.wav": "1.wav"}
    rows = [json.loads(line) for line in content.splitlines()]
    rows = [row | {"audio": swap.get(row["audio"], row["audio"])} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [each.text for each in read_segments(write_annotated(path)).values()]
    assert texts == ["heard 0", "text 1", "text 2", "text 3"]
    assert "2 annotations are of other audio" in capsys.readouterr().out
    assert opened(path).progress()["done"] == 1 and opened(path).next().id == "k1"
    path.write_text(content)
    assert opened(path).progress()["done"] == 3


def test_the_collection_has_what_was_decided(folder):
    desk = opened(folder)
    desk.judge(segment_id(3), "accept", "größe", "uh größe")
    desk.judge(segment_id(0), "reject", "", None)
    rows = [json.loads(line) for line in write_annotated(folder).read_text().splitlines()]
    assert [row["id"] for row in rows] == [*map(segment_id, (1, 2, 3, 4))]
    assert [row["text"] for row in rows] == ["Text 1.", "Text 2.", "größe", "Text 4."]
    assert (rows[2]["chars_per_second"], rows[2]["quality"]) == (10.0, "high")  # half a second
    assert [row.get("annotated") for row in rows] == [None, None, True, None]


def test_only_recordings_of_the_collection_come(folder):
    files, record = folder / "files", folder / "collect.json"
    desk = opened(folder)
    assert {each.labels["speaker"] for each in desk.segments.values()} == {""}
    desk.judge(segment_id(0), "accept", "mine", None)
    write_annotated(folder)
    pruned = files / ("0" * 16)
    pruned.mkdir()
    content = (files / FILE / "segments.jsonl").read_text().replace(FILE, pruned.name)
    (pruned / "segments.jsonl").write_text(content)
    content = json.loads(record.read_text())  # with one that is not made yet
    record.write_text(json.dumps(content | {"files": content["files"] | {"f" * 16: "new.mp3"}}))
    rows = [each.labels for each in read_segments(folder).values()]
    assert [row["id"] for row in rows] == [*map(segment_id, range(5))]
    assert {(row["source"], row["speaker"]) for row in rows} == {("talk.mp3", "s0001")}


def test_what_cannot_be_annotated(tmp_path, folder):
    desk = opened(folder)
    refused(lambda: desk.judge(segment_id(0), "accept", " ", None), "needs a text")
    for duration in (10**90, 1e300, "x", float("nan"), True):
        one = write_list(tmp_path, 1, duration=duration, agreement=duration)
        assert opened(one).progress()["hours"] == 0 and read_segments(one)["k0"].agreement == 1.0
    refused(lambda: opened(write_list(tmp_path, 1, duration=10**400)), "line 1", "401 digits")
    refused(lambda: read_segments(tmp_path / "none"), "has no segments", "titan-tts collect")
    path = write_list(tmp_path, 2)
    path.write_text(path.read_text() * 2)
    refused(lambda: read_segments(path), "two rows have the id 'k0'")
    path.write_text('{"audio": "a.wav"}\n')
    refused(lambda: read_segments(path), "list.jsonl", "the columns audio, but the text is needed")
    path = database_path(folder)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE edits RENAME COLUMN audio TO place")
    refused(lambda: opened(folder), "annotations.sqlite cannot be used (no such column")
    path.write_bytes(b"no database at all" * 100)
    refused(lambda: opened(folder), "annotations.sqlite cannot be used")
    path.unlink()
    write_collection(folder)
    options = Options(output=str(folder / "collection.jsonl"), export=True)
    refused(lambda: annotate_command.run(options), "give its folder")
