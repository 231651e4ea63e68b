"""Shards as Parquet files: the same samples, order and fingerprint as the tars that they were made of."""

import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.helpers.loaders import CHANNELS, assert_same, build, build_and_load, global_batches, take
from tests.helpers.sentences import refused
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data import parquet_shard
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.data.parquet_shard import write_parquet_shard
from torchtitan.models.dit_tts.data.storage import find_shards
from torchtitan.models.dit_tts.errors import InputError

EXTRA = {"titan_tts.channels": str(CHANNELS)}


def stored_rows(tar):
    """The samples of a tar as they are stored, by an independent reader."""
    import io
    import tarfile

    found = {}
    with tarfile.open(tar) as file:
        for member in file:
            key, suffix = member.name.split(".", 1)
            data = file.extractfile(member).read()
            found.setdefault(key, {})[suffix] = (
                data if suffix == "json" else np.load(io.BytesIO(data))
            )
    for key, parts in found.items():
        latents, reference = parts["npy"], parts["ref.npy"]
        lengths = {"frames": len(latents), "reference_frames": len(reference)}
        arrays = {"latents": latents.tobytes(), "reference": reference.tobytes()}
        yield {"key": key, "metadata": parts["json"].decode(), **lengths, **arrays}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """(folder of tars, folder of Parquet files of several row groups)."""
    monkeypatch.setattr(parquet_shard, "_GROUP_BYTES", 20_000)
    tars, tables = (
        make_shards(tmp_path / "tars", 90, seed=5, channels=CHANNELS),
        tmp_path / "tables",
    )
    tables.mkdir()
    for tar in sorted(tars.glob("*.tar")):
        path = tables / f"{tar.stem}.parquet"
        write_parquet_shard(path, stored_rows(tar), CHANNELS, tar.stat().st_size)
        assert pyarrow.parquet.ParquetFile(path).num_row_groups > 2
    return tars, tables


def table_with(path, **changes):
    """One row of a valid shard, but for some columns and for `options` of its writer."""
    options = {"compression": "none", "use_dictionary": False} | changes.pop("options", {})
    extra = changes.pop("extra", EXTRA)
    columns = {"key": ["a"], "frames": np.array([3], np.int32), "metadata": ['{"text": "a"}']}
    columns |= {"reference_frames": np.array([0], np.int32), "reference": [b""]}
    columns |= {"latents": [np.ones((3, CHANNELS), np.float16).tobytes()]} | changes
    table = pyarrow.table(columns).replace_schema_metadata(extra)
    pyarrow.parquet.write_table(table, path, **options)
    return str(path)


def test_the_same_samples_order_and_fingerprint(both):
    of_tars, of_tables = (open_dataset(str(each), CHANNELS) for each in both)
    assert of_tars.fingerprint == of_tables.fingerprint and of_tars.digests == of_tables.digests
    assert of_tars.characters == of_tables.characters and not of_tables.problems
    for sample in range(len(of_tars)):
        assert of_tables.sample_id(sample) == of_tars.sample_id(sample)
        for mine, theirs in zip(of_tables.read(sample), of_tars.read(sample), strict=True):
            assert np.array_equal(mine, theirs)
        assert of_tables.metadata(sample) == of_tars.metadata(sample)
    for left, right in zip(*(global_batches(each, 2, 1, 8) for each in both), strict=True):
        assert_same(left, right)
    # Halfway a run goes on with the other files.
    tars, tables = both
    first = build(tars)
    take(first, 5)
    resumed, plain = (
        build_and_load(tables, first.state_dict()),
        build_and_load(tars, first.state_dict()),
    )
    for (left, _), (right, _) in zip(take(resumed, 5), take(plain, 5), strict=True):
        assert left["sample_id"] == right["sample_id"]
    # And a stored index is read back.
    path = find_shards(str(tables))[0]
    assert os.path.exists(f"{path}.idx")
    assert load_index(path).digest == of_tars.digests[0]


def test_a_bit_that_flips_before_or_after_indexing_is_noticed(both):
    _, tables = both
    path = find_shards(str(tables))[0]
    offset = int(load_index(path).columns["latents_offset"][3])
    content = bytearray(Path(path).read_bytes())
    content[offset + 4] ^= 1
    dataset = open_dataset(path, CHANNELS)
    times = os.stat(path)
    Path(path).write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CorruptSampleError, match="its latents .* changed after indexing"):
        open_dataset(path, CHANNELS).load(3)
    assert dataset.key(3) and dataset.load(2)
    os.remove(f"{path}.idx")
    refused(
        lambda: open_dataset(path, CHANNELS),
        "the .npy of sample 'utt000006' is not as it was written",
    )
    found = open_dataset(path, CHANNELS, on_error="skip", max_corrupt_fraction=0.5)
    assert len(found) == 44 and [problem.kind for _, problem in found.problems] == ["changed"]


def test_a_file_that_is_cut_or_corrupt_is_a_problem_of_the_shard(both):
    _, tables = both
    first, second = find_shards(str(tables))
    content = Path(first).read_bytes()
    Path(first).write_bytes(content[: len(content) // 2])
    refused(lambda: open_dataset(str(tables), CHANNELS), "no Parquet file, or a corrupt one")
    found = open_dataset(str(tables), CHANNELS, on_error="skip", max_corrupt_fraction=0.6)
    assert len(found) == 45
    # A page header that is wrong costs its row group alone.
    column = pyarrow.parquet.ParquetFile(second).metadata.row_group(1).column(0)
    content = bytearray(Path(second).read_bytes())
    content[column.data_page_offset : column.data_page_offset + 12] = b"\xff" * 12
    Path(second).write_bytes(content)
    index = load_index(second)
    assert [problem.kind for problem in index.problems] == ["shard"]
    assert "row group 1 is corrupt" in index.problems[0].sentence
    assert 0 < len(index) < 45


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"options": {"compression": "zstd"}}, "its column latents is ZSTD"),
        ({"options": {"use_dictionary": True}}, "its column latents is UNCOMPRESSED"),
        ({"latents": [[1.0, 2.0]]}, "its column latents is list<"),
        ({"key": pyarrow.array([1])}, "its column key is int64, not string"),
        *(
            ({"extra": {"titan_tts.channels": channels}}, "its titan_tts.channels is no number")
            for channels in ("", "0", "-8", "9" * 5000)
        ),
        *(
            (
                {"extra": EXTRA | {"titan_tts.shard_bytes": size}},
                "its titan_tts.shard_bytes is no number",
            )
            for size in ("-1", "0", "9" * 19, "1" * 5000, "x")
        ),
    ],
)
def test_other_tables_are_refused(tmp_path, changes, words):
    path = table_with(tmp_path / "x.parquet", **changes)
    refused(
        lambda: open_dataset(path, CHANNELS),
        f"is no shard of latents, as {words}",
        "titan-tts prepare FILE",
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"latents": [b"123"]}, "the latents of sample 'a' has 3 bytes for 3 rows of 8"),
        (
            {"latents": pyarrow.array([None], pyarrow.binary())},
            "the latents of sample 'a' is missing",
        ),
        (
            {"frames": pyarrow.array([None], pyarrow.int32())},
            "the latents of sample 'a' is missing",
        ),
        ({"key": pyarrow.array([None], pyarrow.string()), "latents": [b""]}, "of sample ''"),
        (
            {"reference_frames": pyarrow.array([None], pyarrow.int32())},
            "the reference of sample 'a' is missing",
        ),
        *(
            ({"key": [key]}, "cannot name a sample; use a relative name")
            for key in ("", "a.b", "a\0b", "../../x", "/etc/x", "a/./b", "a/")
        ),
        ({"key": pyarrow.array([None], pyarrow.string())}, "key '' cannot name a sample"),
        ({"metadata": ["[]"]}, "the metadata of sample 'a' is not a UTF-8 JSON object"),
        ({"latents": [np.full((3, CHANNELS), np.nan, np.float16).tobytes()]}, "NaN or infinite"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(tmp_path, changes, words):
    path = table_with(tmp_path / "x.parquet", **changes)
    refused(lambda: open_dataset(path, CHANNELS), words)


def test_a_column_that_is_there_twice_is_named(tmp_path):
    path = table_with(tmp_path / "x.parquet")
    table = pyarrow.parquet.read_table(path)
    table = table.append_column("key", pyarrow.array(["b"]))
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    refused(lambda: open_dataset(path, CHANNELS), "'key' is there 2 times")


def test_a_folder_of_both_kinds_is_refused(both):
    tars, tables = both
    path = table_with(tars / "x.parquet")
    refused(lambda: open_dataset(str(tars), CHANNELS), "shards of two kinds, .parquet and .tar")
    assert len(open_dataset(str(tars / "*.tar"), CHANNELS)) == 90
    assert find_shards(str(tables / "*")) == find_shards(str(tables))
    assert open_dataset(path, CHANNELS).sample_id(0) == "x:a"
    with pytest.raises(InputError, match="matches no .tar file"):
        find_shards(str(tables), (".tar",))


def test_a_tar_and_its_parquet_file_are_not_one_dataset_of_two(both):
    tars, tables = both
    path = table_with(tars / "000000.parquet")
    refused(lambda: open_dataset([str(tars / "*.tar"), path], CHANNELS), "names", "twice")
