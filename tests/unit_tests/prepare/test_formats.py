"""Every format's reader: what it lists, how it is recognized, and which mistakes it names."""

import json
import os
import shutil
import tarfile

import av
import numpy as np
import pyarrow
import pytest

from tests.helpers import speech_corpora as corpora
from tests.helpers.corpus_items import items_of, listed, problems_of, table_of, write_tone
from tests.helpers.locked_folder import lock
from tests.helpers.tars import write_tar
from titan_tts.prepare.audio_reader import Loader
from titan_tts.prepare.formats import open_corpus
from titan_tts.prepare.listing import Plan, source_digest, usable_items, write_plan
from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import Unusable, Utterance
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.errors import InputError


@pytest.mark.long
def test_folders_of_recordings(recordings, tmp_path, monkeypatch, capsys):
    mine = [one for one in recordings if one.speaker == "slt"]
    folder = corpora.write_ljspeech(tmp_path / "LJ", mine)
    items = items_of(folder)
    assert [(item.id, item.text) for item in items] == [(one.key, one.text) for one in mine]
    # No quotes are taken off, and nothing is a second field's separator.
    assert items[0].labels["original_text"] == f'"{mine[0].text}", said in figures'
    assert {(item.speaker, item.split) for item in items} == {("LJSpeech", "train")}
    assert items_of(folder, speaker="linda")[0].labels["speaker"] == "linda"
    assert items_of(folder, speaker_pattern="^(...)")[0].speaker == mine[0].key[:3]
    with open(folder / "metadata.csv", "a") as file:
        file.write("no bar\nlost|a text|a text\n")
    first, second = problems_of(folder)
    assert first.id == "metadata.csv line 4" and "1 fields" in first.sentence
    assert second.id == "lost" and "cannot be read (No such file" in second.sentence

    root = corpora.write_libritts_r(tmp_path / "LibriTTS_R", recordings)
    items = items_of(root)
    assert len(items) == len(recordings)
    item = {item.id: item for item in items}["slt_7_000000_000000"]
    assert (item.speaker, item.split) == ("slt", "heldout")
    assert item.labels["subset"] == "dev-clean" and item.labels["chapter"] == "7"
    assert item.labels["original_text"] == item.text.upper()
    # One subset alone is a corpus too, and gives the same items of it.
    subset = items_of(root / "train-clean-100")
    wanted = [item for item in items if item.labels["subset"] == "train-clean-100"]
    assert [item.labels for item in subset] == [item.labels for item in wanted]
    (root / "circle").symlink_to(root)
    write_tone(root / "train-clean-100/slt/7/mute.wav")
    assert "no mute.normalized.txt beside it" in problems_of(root)[-1].sentence
    locked = lock(root / "dev-clean", monkeypatch)
    found = [one.labels for one in listed(root) if isinstance(one, Utterance)]
    assert found == [item.labels for item in wanted]
    assert f"{locked}: cannot be listed (Permission denied)" in capsys.readouterr().out


def test_text_that_is_not_utf8_is_unusable(tmp_path):
    """A sheet saved as cp1252: the other rows remain, and no escape becomes a text."""
    lj = corpora.write_ljspeech(tmp_path / "lj", [])
    tree = tmp_path / "libri/train-clean/s/1"
    for folder in (tmp_path, lj / "wavs", tree):
        for name in "ab":
            write_tone(folder / f"{name}.wav")
    (tree / "a.normalized.txt").write_text("Café")
    (tree / "b.normalized.txt").write_bytes("Café".encode("cp1252"))
    members = good_members() | {"x.json": b'{"speaker": "s"}', "x.txt": "Café".encode()}
    bad = {name.replace("x", "y"): data for name, data in members.items()}
    write_tar(tmp_path / "c.tar", (members | bad | {"y.txt": "Café".encode("cp1252")}).items())
    row = '{{"audio": "{}.wav", "text": "Café", "speaker": "s"}}\n'
    for path, head, one in (
        (tmp_path / "m.csv", "audio,text,speaker\n", "{}.wav,Café,s\n"),
        (tmp_path / "m.tsv", "audio\ttext\tspeaker\n", "{}.wav\tCafé\ts\n"),
        (tmp_path / "m.jsonl", "", row),
        (lj / "metadata.csv", "", "{}|Café|\n"),
    ):
        path.write_bytes((head + one.format("a")).encode() + one.format("b").encode("cp1252"))
    names = ("m.csv", "m.tsv", "m.jsonl", "lj", "libri", "c.tar")
    for source in names:
        item, problem = listed(tmp_path / source)
        assert item.text == "Café" and "is not UTF-8; save it as UTF-8" in problem.sentence
    (tmp_path / "m.csv").write_bytes("audio,text,größe\na.wav,x,1\n".encode("cp1252"))
    with pytest.raises(InputError, match="m.csv: is not UTF-8"):
        listed(tmp_path / "m.csv")


def test_manifest_as_nemo_writes_it(tmp_path):
    write_tone(tmp_path / "long.wav", 2.0)
    write_tone(tmp_path / "sub/whole.v2.wav", 1.0)
    whole = str(tmp_path / "sub/whole.v2.wav")
    part = {"audio_filepath": "long.wav", "text": "a", "duration": 0.25, "speaker": 7}
    rows = [
        part | {"offset": 0},
        part | {"offset": 0.5},
        part | {"offset": 0.75, "snr": float("nan"), "tags": ["x", 1]},
        {"audio_filepath": whole, "text": "c", "duration": 0.99, "speaker": 8, "utt_id": "my.id"},
    ]
    manifest = tmp_path / "train.jsonl"
    manifest.write_text("\ufeff" + "\n".join(json.dumps(row) for row in rows) + "\n\n")
    items = items_of(manifest)
    keys = ["long-00000000", "long-00000500", "long-00000750", "my_id"]
    assert [item.id for item in items] == keys
    assert [item.speaker for item in items] == ["7", "7", "7", "8"]
    assert items[2].labels["snr"] is None and items[2].labels["tags"] == ["x", 1]
    loader = Loader(str(tmp_path))
    lengths = [len(loader.load(item.audio, 128).samples) for item in items]
    assert lengths == [4000, 4000, 4000, 16_000]  # a duration alone is no cut


@pytest.mark.parametrize("listed_as, on_disk", [("o\u0308", "\u00f6"), ("\u00f6", "o\u0308")])
def test_a_list_finds_files_whose_names_are_written_the_other_way(listed_as, on_disk, tmp_path):
    for name in ("said", "other"):
        write_tone(tmp_path / f"{on_disk}/{name}.wav")
    row = {"audio": f"{listed_as}/said.wav", "text": "a", "speaker": "s"}
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps(row | {"reference": f"{listed_as}/other.wav"}) + "\n")
    [item] = items_of(manifest)
    assert item.id == "\u00f6/said"
    assert item.audio == {"file": f"{on_disk}/said.wav"}
    assert item.reference.files == (f"{on_disk}/other.wav",)
    assert len(Loader(str(tmp_path)).load(item.audio, 128).samples) == 1600
    path = table_of(tmp_path, audio=[{"bytes": None, "path": f"{listed_as}/said.wav"}])
    place = {"table": "t.parquet", "group": 0, "row": 0, "column": "audio"}
    for of_table in (items_of(path)[0].audio, place):
        assert len(Loader(str(tmp_path)).load(of_table, 128).samples) == 1600
    manifest.write_text(json.dumps(row | {"reference": f"{on_disk}/said.wav"}) + "\n")
    assert "as its own reference" in problems_of(manifest)[0].sentence
    manifest.write_text(json.dumps(row | {"audio": f"{listed_as}/gone.wav"}) + "\n")
    assert f"{listed_as}/gone.wav' cannot be read" in problems_of(manifest)[0].sentence


def test_a_manifest_names_references(tmp_path):
    for name in ("said.wav", "ann.wav", "bob.wav"):
        write_tone(tmp_path / name)
    manifest = tmp_path / "m.jsonl"

    def listed_with(reference: object) -> Utterance | Unusable:
        row = {"audio": "said.wav", "text": "a", "speaker": "ann+bob", "reference": reference}
        manifest.write_text(json.dumps(row) + "\n")
        [found] = listed(manifest)
        return found

    both = listed_with(["ann.wav", "bob.wav"])
    assert isinstance(both, Utterance) and both.reference.files == ("ann.wav", "bob.wav")
    before = source_digest(open_corpus(Options(str(manifest), "")))
    os.utime(tmp_path / "bob.wav", (1, 2**32))  # one that has changed changes the corpus
    assert source_digest(open_corpus(Options(str(manifest), ""))) != before
    assert listed_with("bob.wav").reference.files == ("bob.wav",)
    for none in ("", None, []):
        assert listed_with(none).audio == {"file": "said.wav"}
    for wrong, sentence in (
        (["ann.wav", "gone.wav"], "gone.wav' cannot be read"),
        (["ann.wav", 3], "a path is needed, or a list of paths"),
        (["ann.wav", "said.wav"], "names said.wav as its own reference"),
    ):
        assert sentence in listed_with(wrong).sentence
    (tmp_path / "m.csv").write_text("audio,text,speaker,reference\nsaid.wav,a,x,ann.wav\n")
    assert listed(tmp_path / "m.csv")[0].reference.files == ("ann.wav",)


ROW = '{"audio": "a.wav", "text": "x", "speaker": "s"}'
NO_DATE = pyarrow.array([2**62], pyarrow.timestamp("us"))  # for which Python has no date
BAD_SOURCES = [
    ("m.jsonl", '["x"]', "m.jsonl line 1: is not a JSON object"),
    ("m.jsonl", '{"text": "x", "speaker": "s"}', "names no audio file"),
    ("m.jsonl", ROW[:-1] + f', "offset": 0, "duration": {"9" * 400}}}', "number of 400 digits"),
    ("m.jsonl", ROW[:-1] + f', "x": {"[" * 500}{"]" * 500}}}', "nested too deeply"),
    ("m.jsonl", ROW.replace('"x"', "5"), '"text" = 5'),
    ("m.jsonl", '{"audio": "a.wav", "text": "x"}', "no speaker.*--speaker NAME"),
    ("m.jsonl", ROW.replace('"s"}', '"s", "split": "all"}'), "'all'"),
    ("m.jsonl", ROW.replace("a.wav", "b.wav"), "b.wav' cannot be read"),
    ("m.jsonl", ROW.replace('"s"}', '"s", "offset": "soon"}'), "'soon'"),
    ("m.jsonl", f"{ROW}\n{ROW}", "more than one rec"),
    ("m.jsonl", ROW.replace('"x"', '"\\ud800"'), "utf-8 cannot encode"),
    ("m.jsonl", f'{{"audio": "a.wav", "x": {"[" * 100_000}{"]" * 100_000}}}', "not a JSON object"),
    ("m.csv", "audio,text,speaker\na.wav,x\n", "does not have the 3 fields"),
    ("m.csv", "a.wav,x,s\n", "a header with one of audio"),
    ("m.csv", 'audio,text,speaker\na.wav,"Hi," he said,s\n', "m.csv line 2: is not CSV"),
    ("m.csv", 'audio,text,speaker\na.wav,"x,s\na.wav,y",s\n', "line 2: has a line break"),
    ("c.tar", {"x.json": b"[1]"}, "KEY.json that is not a JSON object"),
    ("c.tar", {"x.json": b" " * (16 << 20) + ROW.encode()}, "KEY.json that is not a JSON object"),
    ("c.tar", {"x.flac": None}, "lacks an audio member"),
    ("c.tar", {"x.WAV": b"RIFF"}, "more than one audio member"),
    ("c.tar", {"x.flac": None, "x.json": None, "x.png": b""}, "holds no recording"),
    ("t.arrow", "PAR1 no table at all", "t.arrow: cannot be read as a table"),
    ("t.parquet", {}, "has the columns text, speaker; one of latents, audio"),
    ("t.parquet", {"audio": [b"x"], "when": NO_DATE}, "t.parquet: cannot be read as a table"),
]


def test_a_recording_without_a_header_is_known_by_its_name(tmp_path):
    wave = np.sin(np.arange(16_000) / 9).astype(np.float32) / 2
    with av.open(tmp_path / "a.g722", "w") as file:
        stream = file.add_stream("g722", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray((wave * 32767).astype(np.int16)[None], "s16", "mono")
        frame.rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    for name in ("b.G722", "c.mp3"):
        shutil.copy(tmp_path / "a.g722", tmp_path / name)
    rows = [{"audio": each, "text": "a", "reference": "b.G722"} for each in ("a.g722", "c.mp3")]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = items_of(tmp_path / "m.jsonl", speaker="s")
    loader = Loader(str(tmp_path))
    for found in (loader.load(first.audio, 128), *loader.references(first)):
        assert found.rate == 16_000 and abs(len(found.samples) - 16_000) < 400
        level = np.sqrt(np.square(found.samples[2000:15_000]).mean())
        assert level == pytest.approx(0.5 / 2**0.5, rel=0.1)
    with pytest.raises(InputError, match="cannot be decoded"):
        loader.load(second.audio, 128)


@pytest.mark.parametrize("name, content, message", BAD_SOURCES)
def test_bad_sources(name, content, message, tmp_path):
    write_tone(tmp_path / "a.wav")
    path = tmp_path / name
    if name == "t.parquet":
        table_of(tmp_path, **content)
    elif name == "c.tar":
        members = good_members() | content
        write_tar(path, [(name, data) for name, data in members.items() if data is not None])
    else:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        items_of(path)
    assert str(path) in str(caught.value)


def test_quotes_in_lists(tmp_path):
    for name in "abc":
        write_tone(tmp_path / f"{name}.wav")
    # Common Voice does not quote: a quote is a character of the text.
    path = tmp_path / "cv.tsv"
    rows = 's\ta.wav\t"Hello there\ns\tb.wav\t"Hi," he said\ns\tc.wav\tthird"\n'
    path.write_text("client_id\tpath\tsentence\n" + rows)
    assert [item.text for item in items_of(path)] == ['"Hello there', '"Hi," he said', 'third"']
    path = tmp_path / "m.csv"
    path.write_text('audio,text,speaker\na.wav,"x,s\nb.wav,y",s\nc.wav,"a ""b"", c",s\n')
    plan, reader = Plan(), open_corpus(Options(str(path), ""))
    (item,) = usable_items(reader, str(path), "skip", plan)
    assert plan.dropped == {"undecodable": 1} and item.text == 'a "b", c'
    assert (plan.items, plan.train_items, plan.problems[0][0]) == (1, 1, "m.csv line 2")
    # Some of them, by their columns.
    rows = [{"audio": "a.wav", "text": each, "speaker": each, "ok": each == "x"} for each in "xyz"]
    listed = tmp_path / "some.jsonl"
    listed.write_text("".join(json.dumps(row | {"key": row["text"]}) + "\n" for row in rows))
    for where, left in (
        ("speaker=x,z", "xz"), ("ok=true", "x"), ("ok=false; speaker=x, z", "z"), ("no=x", ""),
    ):  # fmt: skip
        plan, options = Plan(), Options(str(listed), "", where=where)
        found = usable_items(open_corpus(options), str(listed), "raise", plan, where)
        assert "".join(item.text for item in found) == left
        assert plan.dropped["not_wanted"] == 3 - len(left)
    # All mistakes of a list are told at once.
    path.write_text("audio,text,speaker\na.wav,x,s\nb.wav,y\nno.wav,z,s\n")
    with pytest.raises(InputError) as caught:
        list(usable_items(open_corpus(Options(str(path), "")), str(path), "raise", Plan()))
    assert "m.csv line 3" in str(caught.value) and "no.wav" in str(caught.value)
    for begin in ("", "\ufeff"):  # a sheet of where the comma is in numbers
        path.write_text(f'{begin}audio;text;speaker\na.wav;"Ja; 1,5 Liter, bitte";s\n')
        assert [item.text for item in items_of(path)] == ["Ja; 1,5 Liter, bitte"]
    path.write_text("audio,text;new,speaker\na.wav,x,s\n")  # a comma goes first
    assert items_of(path, text_column="text;new")[0].text == "x"
    # As pandas writes it; an empty text is silence, as in JSON, and no missing column.
    path.write_text(",audio,text,speaker\n0,a.wav,hello,s\n1,b.wav,,s\n")
    plan = Plan()
    (item,) = usable_items(open_corpus(Options(str(path), "")), str(path), "raise", plan)
    assert item.text == "hello" and "" not in item.labels
    assert plan.dropped == {"empty_text": 1}


def test_lists_without_the_text_s_column(tmp_path):
    write_tone(tmp_path / "a.wav")
    path = tmp_path / "m.csv"
    rows = [f"a.wav,Satz {n},s,k{n},{'x' * (n % 2)}" for n in range(25)]
    path.write_text("\n".join(["audio,satz,speaker,key,note", *rows]) + "\n")
    assert items_of(path, text_column="satz")[24].text == "Satz 24"
    for column, wanted in (("", "text or normalized_text"), ("saz", "saz")):
        with pytest.raises(InputError, match=f"needed as {wanted}.* --text-column\n24 more"):
            items_of(path, text_column=column)
    options = Options(str(path), "", on_error="skip")
    said = (
        "0 usable recordings.* 25 undecodable; k0: has the columns audio, key, satz, speaker, but"
    )
    with pytest.raises(InputError, match=said):
        write_plan(open_corpus(options), options, tmp_path)
    # A reason that all have is told once.
    path.write_text("\n".join(["audio,text,key", *(f"a.wav,x,{n}" for n in range(25))]))
    with pytest.raises(InputError, match="--speaker NAME for all\n24 more .* reason; correct"):
        items_of(path)


def test_webdataset(recordings, tmp_path):
    folder = corpora.write_webdataset(tmp_path / "wds", recordings)
    items = items_of(folder)
    assert {item.id for item in items} == {
        f"{'ab'[number >= len(recordings) // 2]}/{one.key}" for number, one in enumerate(recordings)
    }
    assert {item.text for item in items} == {one.text for one in recordings}
    assert all(item.labels["mood"] == "calm" for item in items)
    for pattern in ("*.tar", "{a,b}.tar"):
        assert items_of(f"{folder}/{pattern}") == items
    # One tar's keys are its own.
    assert items_of(folder / "a.tar")[0].id == items[0].id.removeprefix("a/")
    for row, column in ((b'{"speaker": "s", "text": null}', ""), (b'{"speaker": "s"}', "caption")):
        members = good_members() | {"x.json": row, "x.txt": b"hello\n"}
        write_tar(tmp_path / "c.tar", members.items())
        assert items_of(tmp_path / "c.tar", text_column=column)[0].text == "hello"


def test_a_signature_is_no_part_of_a_key(tmp_path):
    """Behind URLs, keys and digest are those of the tars' names, as they are locally."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        write_tar(tmp_path / f"in/{name}.tar", good_members().items())
    keys = [item.id for item in items_of(tmp_path / "in")]
    assert keys == ["a/x", "b/x"]
    with FolderServer(tmp_path) as server:
        host = server.url.removeprefix("http://")
        readers = [
            open_corpus(Options(f"http://me:{secret}@{host}/in/{{a,b}}.tar?sig={secret}/z", ""))
            for secret in ("hunter2", "other")
        ]
        assert [[item.id for item in reader.items()] for reader in readers] == [keys] * 2
        assert source_digest(readers[0]) == source_digest(readers[1])
        assert len(items_of(f"{server.url}/in/a.tar?part={{1,2}}")) == 2  # no tar is lost


def test_the_digest_tells_size_and_time_of_each_file(tmp_path):
    write_tar(tmp_path / "c.tar", good_members().items())
    corpora.write_tones(tmp_path, "ab", speaker="s")
    tree = tmp_path / "tree/train/s/1"
    write_tone(tree / "a.wav")
    of_texts = set()
    for text in ("one", "two"):  # of one length
        (tree / "a.normalized.txt").write_text(text)
        of_texts.add(source_digest(open_corpus(Options(f"{tmp_path}/tree", ""))))
    assert len(of_texts) == 2
    for source, name in (("c.tar", "c.tar"), ("list.jsonl", "b.wav")):
        file, found = tmp_path / name, set()
        for longer, time in ((0, 5), (0, 6), (10_240, 6)):
            file.write_bytes(file.read_bytes() + bytes(longer))
            os.utime(file, (time, time))
            found.add(source_digest(open_corpus(Options(str(tmp_path / source), ""))))
        assert len(found) == 3


def good_members() -> dict[str, bytes]:
    audio = corpora.audio_bytes(np.zeros(800), 16_000, "FLAC")
    return {"x.flac": audio, "x.json": b'{"text": "one", "speaker": "s"}'}


def test_corrupt_tars_are_noticed(tmp_path):
    members = {f"{k}{n[1:]}": data for k in range(6) for n, data in good_members().items()}
    path = tmp_path / "c.tar"
    write_tar(path, members.items())
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        fifth = tar.getmembers()[4].offset
    flipped = bytearray(content)
    flipped[fifth + 10] ^= 1  # Python's tarfile takes it for the end of the archive
    for corrupt in (content[: fifth + 700], content[:fifth], bytes(flipped), b"not a tar" * 200):
        path.write_bytes(corrupt)
        with pytest.raises(InputError, match="c.tar"):
            items_of(path)
    path.write_bytes(bytes(flipped))
    found = listed(path)
    assert sum(isinstance(one, Utterance) for one in found) == 2  # those before it can be had
    assert sum(isinstance(one, Unusable) for one in found) == 1


def test_layouts_are_recognized_or_named(tmp_path):
    write_tone(tmp_path / "a.wav")
    refused = [("", "auto", "has no known layout"), ("nowhere", "auto", "does not exist")]
    refused += [("", "mp3", "known are auto, ljspeech"), ("", "ljspeech", "no metadata.csv")]
    refused += [("", "table", "holds no .parquet"), ("{c,d}.tar", "auto", "c.tar does not exist")]
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in/c.tar", good_members().items())
    (tmp_path / "in/manifest.jsonl").write_text(ROW.replace("a.wav", "../a.wav"))
    refused += [("in", "auto", "could be manifest or webdataset")]
    (tmp_path / "named").mkdir()
    for name in ("metadata.txt", "notes.txt"):
        (tmp_path / "named" / name).write_text("001|one\n")
    refused += [("named", "auto", "path of its list, such as .*named/metadata.txt")]
    for source, format, message in refused:
        with pytest.raises(InputError, match=message):
            items_of(tmp_path / source, format=format)
    assert len(items_of(tmp_path / "in", format="manifest")) == 1
