"""Who gets which segment, what is kept of the decisions, and how far people agree."""

import json
import random
import sqlite3
import threading
from contextlib import closing

import pytest

from tests.helpers.collected import FILE, segment_id, write_collected, write_list
from tests.helpers.sentences import refused
from titan_tts.annotate import annotate_command, assignment
from titan_tts.annotate.annotate_command import Options
from titan_tts.annotate.assignment import Assignments
from titan_tts.annotate.differences import differences
from titan_tts.annotate.segments import annotated_segments, read_segments, write_annotated
from titan_tts.annotate.store import History, annotations, database_path
from titan_tts.collect.collection import write_collection
from torchtitan.models.dit_tts.errors import InputError


@pytest.fixture
def folder(tmp_path):
    return write_collected(tmp_path / "out", [0.9, 0.2, 1.0, 0.2, 0.5])


def opened(folder, double=0.0):
    return Assignments(database_path(folder), read_segments(folder), double)


def ids(folder, annotator, count):
    desk, found = opened(folder), []
    for _ in range(count):
        task = desk.next(annotator)
        found.append(task and task.segment.id)
        if task:
            desk.judge(annotator, task.segment.id, "accept", "yes", None)
    return found


def test_the_least_agreement_comes_first_then_the_id(folder):
    assert ids(folder, "ann", 6) == [*map(segment_id, (1, 3, 4, 0, 2)), None]


def test_nobody_gets_what_another_has_or_has_judged(folder, monkeypatch):
    desk = opened(folder)
    first = desk.next("ann").segment.id
    assert desk.next("ann").segment.id == first  # a page is loaded again
    second = desk.next("bob").segment.id
    assert second != first
    with pytest.raises(InputError, match="ann took"):
        desk.judge("bob", first, "accept", "mine", None)
    desk.judge("ann", first, "reject", "", None)
    for each in (desk, opened(folder)):  # also on another server
        with pytest.raises(InputError, match="ann took"):
            each.judge("bob", first, "accept", "mine", None)
    # A lease ends, and the segment goes to whom asks; what its former holder sends late is refused then.
    now = assignment.time.time()
    monkeypatch.setattr(assignment.time, "time", lambda: now + 1 + assignment.LEASE_SECONDS)
    assert desk.next("ann").segment.id == second
    with pytest.raises(InputError, match="took"):
        desk.judge("bob", second, "accept", "late", None)
    assert annotations(folder) == {first: None}


def test_many_at_once_judge_each_segment_once(tmp_path):
    folder = write_collected(tmp_path / "out", [0.5] * 12)
    desk = opened(folder)

    def work(name):
        while task := desk.next(name):
            desk.judge(name, task.segment.id, "accept", name, None)

    threads = [threading.Thread(target=work, args=[f"p{number}"]) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    with sqlite3.connect(database_path(folder)) as connection:
        rows = connection.execute("SELECT segment, annotator FROM edits").fetchall()
    assert sorted(segment for segment, _ in rows) == [segment_id(number) for number in range(12)]


def test_undo_is_another_row_and_brings_the_segment_back(folder):
    desk = opened(folder)
    a, b = segment_id(1), segment_id(3)
    desk.judge("ann", a, "accept", "one", "uh one")
    desk.judge("ann", a, "accept", "one", "uh one")  # the page sent it twice
    desk.judge("ann", b, "reject", "two", "uh two")
    kept = {"annotated": True, "annotator": "ann", "text": "one", "text_verbatim": "uh one"}
    assert annotations(folder) == {a: kept, b: None}
    task = desk.undo("ann")
    assert (task.segment.id, task.undone.action, task.undone.text) == (b, "reject", "two")
    assert annotations(folder) == {a: kept} and desk.next("ann").segment.id == b
    assert opened(folder).undo("ann").segment.id == a and annotations(folder) == {}
    refused(lambda: opened(folder).undo("ann"), "nothing to undo")
    with sqlite3.connect(database_path(folder)) as connection:
        actions = [row[0] for row in connection.execute("SELECT action FROM edits ORDER BY id")]
        assert actions == ["accept", "reject", "undo", "undo"]
        with pytest.raises(sqlite3.IntegrityError, match="kept"):
            connection.execute("DELETE FROM edits")
        with pytest.raises(sqlite3.IntegrityError, match="kept"):
            connection.execute("UPDATE edits SET text = ''")


def test_a_skipped_segment_comes_back_last(folder):
    desk, seen = opened(folder), []
    for _ in range(7):
        seen.append(desk.next("ann").segment.id)
        desk.judge("ann", seen[-1], "skip", "", None)
    order = [*map(segment_id, (1, 3, 4, 0, 2))]
    assert seen == order + order[:2] and annotations(folder) == {}
    assert desk.progress()["done"] == 0 and desk.next("bob").segment.id == order[0]


@pytest.mark.parametrize("seed", range(2))
def test_what_is_counted_on_the_way_is_what_a_scan_finds(tmp_path, seed):
    folder = write_collected(tmp_path / "out", [0.5, 0.2, 0.7, 0.2, 0.9, 0.1, 0.4, 0.3])
    desk, chance = opened(folder, 0.4), random.Random(seed)
    order, people = [each.id for each in desk.order], ["ann", "bob", "carl"]
    edits, leases = {name: [] for name in people}, {}

    def of(name, segment):
        return [edit for edit in edits[name] if edit[1] == segment]

    def judges(segment):
        last = [(of(name, segment)[-1], name) for name in people if of(name, segment)]
        return sorted(each for each in last if each[0][2] != "skip")

    def is_free(segment, name):
        judged = {who for _, who in judges(segment)}
        others = judged | {who for who in people if leases.get(who) == segment}
        return name not in judged and len(others - {name}) < desk.wanted[segment]

    for number in range(60):
        name, action = chance.choice(people), chance.choice(["accept", "reject", "skip", "undo"])
        if action == "undo":
            if edits[name]:
                leases[name] = edits[name].pop()[1]
                assert desk.undo(name).segment.id == leases[name]
        free = [segment for segment in order if is_free(segment, name)]
        mine = [segment for segment in free if leases.get(name) == segment]
        wanted = min(mine or free, key=lambda each: len(of(name, each)), default=None)
        task = desk.next(name)
        assert (task and task.segment.id) == wanted, number
        if task and action != "undo":
            desk.judge(name, wanted, action, "x", None)
            edits[name].append((number, wanted, action))
        if task:
            leases[name] = wanted if action == "undo" else None
        done = [found for each in order if len(found := judges(each)) >= desk.wanted[each]]
        rejected = sum(found[-1][0][2] == "reject" for found in done)
        counts = {"done": len(done), "rejected": rejected, "hours_done": len(done) * 0.5 / 3600}
        assert desk.progress().items() >= counts.items()


def test_two_people_judge_a_part(tmp_path):
    folder = write_collected(tmp_path / "out", [0.5] * 200)
    desk = opened(folder, 0.25)
    double = {name for name, wanted in desk.wanted.items() if wanted == 2}
    assert 30 < len(double) < 70 and opened(folder, 0.25).wanted == desk.wanted
    one, two, three = sorted(double)[:3]
    desk.judge("bob", one, "accept", "a bad dog", None)
    desk.judge("ann", one, "accept", "the bad dog", None)
    for name, action in (("bob", "reject"), ("ann", "reject")):
        desk.judge(name, two, action, "x", None)
    for name, action in (("ann", "accept"), ("bob", "reject")):
        desk.judge(name, three, action, "x", None)
    with pytest.raises(InputError, match="ann and bob"):
        desk.judge("carl", one, "reject", "", None)
    assert annotations(folder)[three] is None and annotations(folder)[one]["annotator"] == "ann"
    assert desk.progress() == {"done": 3, "rejected": 2, "all": 200} | {
        name: pytest.approx(n * 0.5 / 3600) for name, n in (("hours_done", 3), ("hours", 200))
    }


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
    desk.judge("ann", "k1", "accept", "größer", None)
    desk.judge("ann", "k2", "reject", "", None)
    assert write_annotated(path) == tmp_path / "list.annotated.jsonl"
    first, second, last = (tmp_path / "list.annotated.jsonl").read_bytes().splitlines(True)
    assert (first, last) == (before[0], before[3]) and path.read_bytes() == b"".join(before)
    changes = {"text": "größer", "annotated": True, "annotator": "ann"}
    changes["annotated_audio"] = '{"file": "1.wav"}'
    assert json.loads(second) == json.loads(before[1]) | changes and second.endswith(b"}\r\n")
    assert desk.progress()["hours"] == pytest.approx(2 / 3600)


def test_a_text_never_comes_to_other_audio(tmp_path, capsys):
    path = write_list(tmp_path, 4)
    desk, content = opened(path), path.read_text()
    for number in range(3):
        desk.judge("ann", f"k{number}", "accept", f"heard {number}", None)
    # The audio of k1 and k2 is swapped.
    swap = {"1.wav": "2.wav", "2.wav": "1.wav"}
    for file in (path, write_annotated(path)):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [
            {"annotated": False} | row | {"audio": swap.get(row["audio"], row["audio"])}
            for row in rows
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "2 annotations are of other audio"
    assert said not in capsys.readouterr().out
    assert [each.text for each in annotated_segments(file)] == ["heard 0"]
    assert said in capsys.readouterr().out
    texts = [each.text for each in read_segments(write_annotated(path)).values()]
    assert texts == ["heard 0", "text 1", "text 2", "text 3"] and said in capsys.readouterr().out
    assert opened(path).progress()["done"] == 1 and opened(path).next("ann").segment.id == "k1"
    path.write_text(content)
    assert opened(path).progress()["done"] == 3


def test_the_collection_has_what_was_decided(folder):
    audio = {path: path.read_bytes() for path in folder.glob("files/*/*")}
    desk = opened(folder)
    desk.judge("ann", segment_id(3), "accept", "größer", "uh größer")
    desk.judge("ann", segment_id(0), "reject", "", None)
    path = write_annotated(folder)
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert path.name == "collection.jsonl" and list(rows) == [*map(segment_id, (1, 2, 3, 4))]
    changed = {
        "annotated": True,
        "annotator": "ann",
        "text": "größer",
        "text_verbatim": "uh größer",
        "quality": "high",  # confirmed, whatever recognizers agreed on
    }
    assert rows[segment_id(3)].items() >= changed.items()
    assert rows[segment_id(1)]["text"] == "Text 1." and "annotated" not in rows[segment_id(1)]
    assert {path: path.read_bytes() for path in folder.glob("files/*/*")} == audio


def test_only_recordings_of_the_collection_come(folder):
    files, record = folder / "files", folder / "collect.json"
    desk = opened(folder)
    assert {each.row["speaker"] for each in desk.order} == {""}
    desk.judge("ann", segment_id(0), "accept", "mine", None)
    write_annotated(folder)
    pruned = files / ("0" * 16)
    pruned.mkdir()
    content = (files / FILE / "segments.jsonl").read_text().replace(FILE, pruned.name)
    (pruned / "segments.jsonl").write_text(content)
    content = json.loads(record.read_text())  # with one that is not made yet
    record.write_text(json.dumps(content | {"files": content["files"] | {"f" * 16: "new.mp3"}}))
    rows = [each.row for each in read_segments(folder).values()]
    assert [row["id"] for row in rows] == [*map(segment_id, range(5))]
    assert {(row["source"], row["speaker"]) for row in rows} == {("talk.mp3", "s0001")}


def test_what_cannot_be_annotated(tmp_path, folder):
    desk = opened(folder)
    refused(lambda: desk.judge("ann", segment_id(0), "accept", " ", None), "needs a text")
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
    refused(lambda: opened(folder).next("ann"), "annotations.sqlite cannot be used (no such column")
    path.write_bytes(b"no database at all" * 100)
    refused(lambda: opened(folder), "annotations.sqlite cannot be used")
    path.unlink()
    path.mkdir()
    refused(lambda: opened(folder), "annotations.sqlite cannot be used")
    path.rmdir()
    write_collection(folder)
    options = Options(output=str(folder / "collection.jsonl"), export=True)
    refused(lambda: annotate_command.run(options), "give its folder")


def test_a_click_costs_no_more_the_more_is_judged(tmp_path, monkeypatch):
    folder, asked = write_collected(tmp_path / "out", [0.5] * 150), []
    judgements = History.judgements
    monkeypatch.setattr(
        History, "judgements", lambda *each: asked.append(each) or judgements(*each)
    )
    costs = []
    for double in (0.0, 1.0):
        desk = opened(folder, double)
        desk.judge("ann", desk.next("ann").segment.id, "skip", "", None)
        for number in range(60):
            desk.judge("ann", desk.next("ann").segment.id, "accept", "x", None)
            if number in (5, 55):
                del asked[:]
                desk.judge("ann", desk.next("ann").segment.id, "reject", "x", None)
                desk.undo("ann")
                assert desk.progress()["all"] == 150 and desk.next("ann")
                costs.append(len(asked))
    assert max(costs) < 30, costs
    other = opened(folder, 1.0)  # which reads it all at once
    assert other.progress() == desk.progress()
    assert other.next("ann").segment.id == desk.next("ann").segment.id
