"""Tables of audio, of latents and of paths, and the shards of other programs."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.helpers import speech_corpora as corpora
from tests.helpers.corpus_items import items_of, problems_of, table_of, write_tone
from titan_tts.prepare.audio_reader import Loader
from torchtitan.models.dit_tts.errors import InputError

SHARD_ROW = {
    "key": ["a"],
    "frames": pyarrow.array([1], pyarrow.int32()),
    "latents": [bytes(256)],
    "reference_frames": pyarrow.array([0], pyarrow.int32()),
    "reference": [b""],
    "metadata": ['{"text": "a", "speaker": "s"}'],
}


def write_rows(tmp_path, rows):
    parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


@pytest.mark.parametrize("name", SHARD_ROW)
def test_rows_of_a_foreign_shard(name, tmp_path):
    if name == "latents":
        large = {"latents": pyarrow.array([bytes(256)], pyarrow.large_binary())}
        with pytest.raises(InputError, match="its column latents is large_binary, not binary"):
            items_of(write_rows(tmp_path, SHARD_ROW | large))
        return
    rows = {other: values for other, values in SHARD_ROW.items() if other != name}
    for wrong, kind in ((rows, "missing"), (rows | {name: [1.5]}, "double")):
        with pytest.raises(InputError, match=f"its column {name} is {kind}, not "):
            items_of(write_rows(tmp_path, wrong))
    if name != "reference":
        nulls = pyarrow.array([None], pyarrow.table(SHARD_ROW)[name].type)
        [found] = problems_of(write_rows(tmp_path, rows | {name: nulls}))
        assert "has nulls" in found.sentence


@pytest.mark.parametrize("kind", ["<f2", "<f4"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_latents_of_a_foreign_shard(kind, count, tmp_path):
    latents = [np.arange(n * 128, dtype=kind).reshape(n, 128) / 64 - n for n in (count, 1)]
    cells = {
        "key": ["a", "b"],
        "frames": pyarrow.array([count, 1], pyarrow.int32()),
        "latents": [each.tobytes() for each in latents],
        "reference_frames": pyarrow.array([0, count], pyarrow.int32()),
        "reference": [b"", latents[0].astype("<f2").tobytes()],
        "metadata": ['{"text": "a", "speaker": "s"}', '{"text": "b", "speaker": "s"}'],
    }
    items, loader = items_of(write_rows(tmp_path, cells)), Loader(str(tmp_path))
    loaded = [loader.load(item.audio, 128) for item in items]
    assert [item.id for item in items] == ["a", "b"]
    for one, expected in zip(loaded, latents, strict=True):
        np.testing.assert_array_equal(one.latents, expected)
    assert len(loaded[0].reference) == 0
    np.testing.assert_array_equal(loaded[1].reference, latents[0])


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("names", [["audio", "text", "text"], ["audio", "audio", "text"], "struct"])
def test_a_name_that_is_there_twice(names, suffix, tmp_path):
    columns = [pyarrow.array([each]) for each in ("a.wav", "b.wav", "c")]
    if names == "struct":
        columns = [pyarrow.StructArray.from_arrays(columns[:2], ["path", "path"]), columns[2]]
        names = ["audio", "text"]
    table = pyarrow.Table.from_arrays(columns, names)
    path = str(tmp_path / f"t.{suffix}")
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    with pytest.raises(InputError, match="t.[a-z]*: cannot be read as a table"):
        [item] = items_of(path, speaker="s")
        Loader(str(tmp_path)).load(item.audio, 128)


def shard_of(latents):
    return SHARD_ROW | {"latents": [latents.tobytes()]}


@pytest.mark.parametrize(
    "columns, message",
    [
        (shard_of(np.full((1, 128), np.nan, "<f2")), "not finite in float16"),
        (shard_of(np.full((1, 128), 1e9, "<f4")), "not finite in float16"),
        (shard_of(np.zeros((1, 127), "<f4")), "508 bytes for 1 frames of 128 channels"),
        ({"latents": pyarrow.array([[]])}, "has no frame"),
        ({"latents": [[float("nan")] * 128]}, "missing or not finite"),
        ({"latents": [[None] * 128]}, "missing or not finite"),
        ({"latents": [[0.0] * 100]}, "frames of 128 numbers are needed"),
        ({"latents": [[[0.0] * 64] * 2]}, r"\(2, 64\); frames of 128 numbers are needed"),
        ({"latents": [[[0.0] * 128, [0.0]]]}, "frames of 128 numbers are needed"),
        ({"latents": [3.0]}, "frames of 128 numbers are needed"),
        ({"latents": ["x"]}, "frames of 128 numbers are needed"),
    ],
)
def test_bad_latents(columns, message, tmp_path):
    (item,) = items_of(table_of(tmp_path, **columns))
    with pytest.raises(InputError, match=message):
        Loader(str(tmp_path)).load(item.audio, 128)


def test_table_of_audio(recordings, tmp_path):
    recordings = recordings[:7]
    folder = corpora.write_parquet(tmp_path / "t", recordings)
    items = items_of(folder)
    assert [item.id for item in items] == [f"all-00000-of-00001-{n:08d}" for n in range(7)]
    assert [item.text for item in items] == [one.text for one in recordings]
    assert {item.speaker for item in items} == {"0", "1"} and "audio" not in items[0].labels
    loader = Loader(str(folder))
    for number in (0, 1, 6, 3, 4, 2, 5):  # forwards, backwards, over row groups
        samples = loader.load(items[number].audio, 128).samples[:, 0]
        np.testing.assert_allclose(samples, recordings[number].samples, atol=1e-4)
    assert items_of(folder / "all-00000-of-00001.parquet") == items


@pytest.mark.parametrize("bytes_type", ["null", "binary"])
def test_table_of_paths_and_split_by_file(bytes_type, tmp_path):
    write_tone(tmp_path / "data/clips/a.wav")
    struct = {"audio": {"bytes": None, "path": "clips/a.wav"}, "text": "one", "speaker": "s"}
    flat = {"path": "clips/a.wav", "text": "two", "speaker": "s", "blob": b"\0", "key": "k"}
    for name, row in (("train-0.parquet", struct), ("test-0.parquet", flat)):
        table = pyarrow.Table.from_pylist([row])
        if row is struct:
            audio = pyarrow.struct({"bytes": bytes_type, "path": "string"})
            table = table.set_column(0, "audio", table["audio"].cast(audio))
        parquet.write_table(table, tmp_path / "data" / name)
    items, loader = items_of(tmp_path), Loader(str(tmp_path / "data"))
    named = [(item.id, item.split) for item in items]
    assert named == [("k", "heldout"), ("train-0-00000000", "train")]
    assert not {"blob", "path"} & items[0].labels.keys()
    assert [len(loader.load(item.audio, 128).samples) for item in items] == [1600] * 2
    (tmp_path / "data/clips/a.wav").unlink()
    for item in items:
        with pytest.raises(InputError, match="a.wav' cannot be read"):
            loader.load(item.audio, 128)


def test_splits_by_folder(tmp_path):
    row = {"audio": b"x", "text": "one", "speaker": "s"}
    names = ("default/test/0", "default/train/0", "test-clean/data-0", "valentina/0")
    for number, name in enumerate(names):
        path = tmp_path / "tests" / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist([row | {"id": str(number)}]), path)
    splits = {item.id: item.split for item in items_of(tmp_path / "tests")}
    assert splits == {"0": "heldout", "1": "train", "2": "heldout", "3": "train"}
    # Folders above the source do not count.
    assert items_of(tmp_path / "tests/valentina")[0].split == "train"
    assert items_of(tmp_path / "tests/valentina/0.parquet")[0].split == "train"
    assert items_of(f"{tmp_path}/tests/*/data-*.parquet")[0].split == "heldout"
