"""Every format's reader: what it lists, how it is recognized, and which mistakes it names."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from tests.helpers import speech_corpora as corpora
from tests.helpers.corpus_items import items_of, listed, problems_of, table_of, write_tone
from tests.helpers.locked_folder import lock
from tests.helpers.tars import write_tar
from titan_tts.prepare.audio_reader import Loader
from titan_tts.prepare.formats import open_corpus
from titan_tts.prepare.listing import Plan, source_digest, usable_items
from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import Reference, Unusable, Utterance
from tools.harness.http_server import FolderServer
from torchtitan.models.dit_tts.errors import InputError


@pytest.mark.long
def test_folders_of_recordings(recordings, tmp_path, monkeypatch, capsys):
    root = corpora.write_libritts_r(tmp_path / "LibriTTS_R", recordings)
    items = items_of(root)
    assert len(items) == len(recordings)
    item = {item.id: item for item in items}["slt_7_000000_000000"]
    assert (item.speaker, item.split) == ("slt", "heldout")
    labels = {"subset": "dev-clean", "chapter": "7", "original_text": item.text.upper()}
    assert item.labels.items() >= labels.items()
    # One subset alone is a corpus too, and gives the same items of it.
    wanted = [item.labels for item in items if item.labels["subset"] == "train-clean-100"]
    assert [item.labels for item in items_of(root / "train-clean-100")] == wanted
    (root / "circle").symlink_to(root)
    write_tone(root / "train-clean-100/slt/7/mute.wav")
    assert "no mute.normalized.txt next to it" in problems_of(root)[-1].sentence
    locked = lock(root / "dev-clean", monkeypatch)
    assert [one.labels for one in listed(root) if isinstance(one, Utterance)] == wanted
    assert f"{locked}: cannot be listed (Permission denied)" in capsys.readouterr().out


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
    manifest = write_rows(tmp_path / "train.jsonl", *rows)
    manifest.write_text(f"\ufeff{manifest.read_text()}\n")
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
    manifest = write_rows(tmp_path / "m.jsonl", row | {"reference": f"{listed_as}/other.wav"})
    [item] = items_of(manifest)
    assert item.id == "\u00f6/said"
    assert item.audio == {"file": f"{on_disk}/said.wav"}
    assert item.reference.files == (f"{on_disk}/other.wav",)
    table = table_of(tmp_path, audio=[{"bytes": None, "path": f"{listed_as}/said.wav"}])
    for place in (item.audio, items_of(table)[0].audio):
        assert len(Loader(str(tmp_path)).load(place, 128).samples) == 1600
    write_rows(manifest, row | {"reference": f"{on_disk}/said.wav"})
    assert "as its own reference" in problems_of(manifest)[0].sentence
    write_rows(manifest, row | {"audio": f"{listed_as}/gone.wav"})
    assert f"{listed_as}/gone.wav' cannot be read" in problems_of(manifest)[0].sentence


def test_a_manifest_names_references(tmp_path):
    for name in ("said.wav", "ann.wav", "bob.wav"):
        write_tone(tmp_path / name)
    manifest = tmp_path / "m.jsonl"
    row = {"audio": "said.wav", "text": "a", "speaker": "ann+bob"}
    for given, found in (
        ("bob.wav", ("bob.wav",)),
        (["ann.wav", "bob.wav"], ("ann.wav", "bob.wav")),
        *((none, None) for none in ("", None, [])),
    ):
        [item] = listed(write_rows(manifest, row | {"reference": given}))
        assert item.reference == (Reference(found) if found else None)
    for wrong, sentence in (
        (["ann.wav", "gone.wav"], "gone.wav' cannot be read"),
        (["ann.wav", 3], "a path is needed, or a list of paths"),
        (["ann.wav", "said.wav"], "names said.wav as its own reference"),
    ):
        [item] = listed(write_rows(manifest, row | {"reference": wrong}))
        assert sentence in item.sentence
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
    ("m.json", f"[\n {ROW},\n {ROW}\n]", "m.json: is JSON of several lines; write one object per"),
    ("m.csv", "audio,text,speaker\na.wav,x\n", "does not have the 3 fields"),
    ("m.csv", "a.wav,x,s\n", "a header with one of audio"),
    ("m.csv", 'audio,text,speaker\na.wav,"Hi," he said,s\n', "m.csv line 2: is not CSV"),
    ("m.csv", 'audio,text,speaker\na.wav,"x,s\na.wav,y",s\n', "line 2: has a line break"),
    ("metadata.csv", "a|one|\nno bar\n", "metadata.csv line 2: has 1 fields"),
    ("m.txt", b"\xff\xfea\0|\0b\0", "m.txt: is not UTF-8; save it as UTF-8"),
    (
        "metadata.csv",
        "id|text|speaker\nlost|one|s\n",
        "lost: the audio file .*lost.wav' cannot be read",
    ),
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
    for name in ("a.g722", "b.G722", "c.mp3"):
        (tmp_path / name).write_bytes(bytes(8000))
    rows = [{"audio": each, "text": "a", "reference": "b.G722"} for each in ("a.g722", "c.mp3")]
    first, second = items_of(write_rows(tmp_path / "m.jsonl", *rows), speaker="s")
    loader = Loader(str(tmp_path))
    for found in (loader.load(first.audio, 128), *loader.references(first)):
        assert found.rate == 16_000 and len(found.samples) == 16_000
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
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message) as caught:
        items_of(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "name, content, texts",
    [
        # Common Voice does not quote: a quote is a character of the text.
        ("m.tsv", 'client_id\tpath\tsentence\ns\ta.wav\t"Hello\ns\tb.wav\t"Hi," he\n', ['"Hello', '"Hi," he']),
        ("m.csv", 'audio,text,speaker\na.wav,"a ""b"", c",s\n', ['a "b", c']),
        # Sheets of where the comma is in numbers; a comma goes first.
        ("m.csv", 'audio;text;speaker\na.wav;"Ja; 1,5 Liter, bitte";s\n', ["Ja; 1,5 Liter, bitte"]),
        ("m.csv", '\ufeffaudio;text;speaker\na.wav;"Ja; 1,5 l";s\n', ["Ja; 1,5 l"]),
        ("m.csv", "audio,text,a;b,speaker\na.wav,x,y,s\n", ["x"]),
        # As people type it, with a blank behind the comma.
        ("m.csv", 'audio, text, speaker\na.wav, "Yes, a", s\n', ["Yes, a"]),
        # As pandas writes it; an empty text is silence, as in JSON, and no missing column.
        ("m.csv", ",audio,text,speaker\n0,a.wav,hello,s\n1,b.wav,,s\n", ["hello"]),
    ],
)  # fmt: skip
def test_quotes_and_separators_of_lists(name, content, texts, tmp_path):
    for each in "ab":
        write_tone(tmp_path / f"{each}.wav")
    (tmp_path / name).write_text(content)
    items = items_of(tmp_path / name)
    assert [item.text for item in items] == texts and "" not in items[0].labels


def test_what_is_left_out_of_a_list(tmp_path):
    """By --where, by --on-error skip, or for an empty text; without these all mistakes are told at once."""
    write_tone(tmp_path / "a.wav")
    rows = [{"audio": "a.wav", "text": each, "speaker": each, "ok": each == "x"} for each in "xyz"]
    some = write_rows(tmp_path / "m.jsonl", *(row | {"key": row["text"]} for row in rows))

    def taken(source, on_error="raise", where=""):
        plan, reader = Plan(), open_corpus(Options(str(source), ""))
        found = usable_items(reader, str(source), on_error, plan, where)
        return "".join(item.text for item in found), plan

    for where, left in (
        ("speaker=x,z", "xz"), ("ok=true", "x"), ("ok=false; speaker=x, z", "z"), ("no=x", ""),
    ):  # fmt: skip
        found, plan = taken(some, where=where)
        assert found == left and plan.dropped["not_wanted"] == 3 - len(left)
    path = tmp_path / "m.csv"
    path.write_text("audio,text,speaker\na.wav,x,s\nb.wav,y\nno.wav,z,s\n")
    found, plan = taken(path, "skip")
    assert (found, plan.items, plan.train_items, plan.dropped) == ("x", 1, 1, {"undecodable": 2})
    assert plan.problems[0][0] == "m.csv line 3"
    with pytest.raises(InputError) as caught:
        taken(path)
    some = str(caught.value)
    assert "m.csv line 3" in some and "no.wav" in some and f"count from {tmp_path}; " in some
    assert some.endswith("--on-error skip")
    # Where most files are missing, their paths are wrong, and to leave them out is no help.
    path.write_text("audio,text,speaker\na.wav,x,s\nno.wav,y,s\nnot.wav,z,s\n")
    with pytest.raises(InputError) as caught:
        taken(path)
    assert str(caught.value).endswith(
        f"no.wav' cannot be read (No such file or directory)\n1 more cannot be used for the same reason; "
        f"paths that are not absolute count from {tmp_path}; correct them, or move the list"
    )
    path.write_text("audio,text,speaker\na.wav,,s\n")
    assert taken(path)[1].dropped == {"empty_text": 1}


def test_lists_without_the_text_s_column(tmp_path):
    write_tone(tmp_path / "a.wav")
    path = tmp_path / "m.csv"
    rows = [f"a.wav,Satz {n},s,k{n},{'x' * (n % 2)}" for n in range(25)]
    path.write_text("\n".join(["audio,satz,speaker,key,note", *rows]) + "\n")
    assert items_of(path, text_column="satz")[24].text == "Satz 24"
    for column, wanted in (("", "text or normalized_text"), ("saz", "saz")):
        with pytest.raises(InputError, match=f"needed as {wanted}.* --text-column\n24 more"):
            items_of(path, text_column=column)
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
    members = {f"{k}/{n}": data for k in "pq" for n, data in good_members().items()}
    write_tar(tmp_path / "folders.tar", members.items())
    assert [item.id for item in items_of(tmp_path / "folders.tar")] == ["p/x", "q/x"]
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
    row = {"audio": "a.wav", "text": "a", "speaker": "s", "reference": "b.wav"}
    write_rows(tmp_path / "referring.jsonl", row)
    tree = tmp_path / "tree/train/s/1"
    write_tone(tree / "a.wav")
    digest = lambda name: source_digest(open_corpus(Options(f"{tmp_path}/{name}", "")))  # noqa: E731
    of_texts = set()
    for text in ("one", "two"):  # of one length
        (tree / "a.normalized.txt").write_text(text)
        of_texts.add(digest("tree"))
    assert len(of_texts) == 2
    for source in ("c.tar", "list.jsonl", "referring.jsonl"):
        file, found = tmp_path / ("c.tar" if source == "c.tar" else "b.wav"), set()
        for longer, time in ((0, 2**32), (0, 2**33), (10_240, 2**33)):
            file.write_bytes(file.read_bytes() + bytes(longer))
            os.utime(file, (time, time))
            found.add(digest(source))
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
    (tmp_path / "c.ZIP").write_bytes(b"PK")
    refused += [("c.ZIP", "auto", "unpack it first")]
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
    (tmp_path / "two").mkdir()
    for name in ("manifest.csv", "metadata.jsonl"):
        (tmp_path / "two" / name).write_text(ROW)
    refused += [("two", "manifest", "is not a manifest")]
    for source, format, message in refused:
        with pytest.raises(InputError, match=message):
            items_of(tmp_path / source, format=format)
    assert len(items_of(tmp_path / "in", format="manifest")) == 1
