"""Real speech in every layout: prepared, read by independent readers, trained on; kills and engines."""

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import speech_corpora as corpora
from tools.harness import forked, runs
from torchtitan.models.dit_tts.data.dataset import open_dataset

FORMATS = ("ljspeech", "libritts_r", "manifest", "webdataset", "table", "latents")
SETTINGS = {"samples_per_shard": 5, "chunk_items": 4}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, Path]:
    """The output folder of each format."""
    folder = tmp_path_factory.mktemp("sources")
    everyone = corpora.speech(each=3)
    sources = {
        "ljspeech": corpora.write_ljspeech(
            folder / "LJSpeech-1.1", corpora.speech(each=9, voices=("slt",))
        ),
        "libritts_r": corpora.write_libritts_r(folder / "LibriTTS_R", everyone),
        "manifest": corpora.write_manifest(folder / "manifest", everyone),
        "webdataset": corpora.write_webdataset(folder / "wds", everyone),
        "table": corpora.write_parquet(folder / "table", everyone),
        "latents": corpora.write_latents_table(folder / "latents", everyone, flat=True),
    }
    outputs = {}
    for name, source in sources.items():
        outputs[name] = folder / "out" / name
        record = corpora.prepare(source, outputs[name], **SETTINGS)
        summary = record["summary"]
        assert not summary["dropped"] and not record["reused"]
        samples = summary["train"]["samples"], summary["heldout"]["samples"]
        assert samples == ((10, 0) if name == "ljspeech" else (12, 4))
    return outputs


@pytest.mark.parametrize("name", ["webdataset", "latents"])
def test_independent_readers_find_the_same_samples(prepared, name, tmp_path):
    """webdataset and Hugging Face datasets against our own loader."""
    import datasets
    import webdataset

    dataset = open_dataset(str(prepared[name] / "train"))
    ours = {}
    for number in range(len(dataset)):
        key = dataset.sample_id(number).split(":", 1)[1]
        latents, reference = dataset.read(number)
        ours[key] = (latents, reference, dataset.metadata(number))
    tars = sorted(map(str, (prepared[name] / "train").glob("*.tar")))
    assert len(tars) == -(-len(ours) // 5) and len(ours) == len(dataset)

    read = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False)
    theirs = {
        sample["__key__"]: (
            np.load(io.BytesIO(sample["npy"])),
            np.load(io.BytesIO(sample["ref.npy"])),
            json.loads(sample["json"]),
        )
        for sample in read
    }
    table = datasets.load_dataset(
        "webdataset", data_files={"train": tars}, split="train", cache_dir=str(tmp_path)
    )
    hugging_face = {
        row["__key__"]: (np.array(row["npy"]), np.array(row["ref.npy"]), row["json"])
        for row in table
    }
    for found in (theirs, hugging_face):
        assert found.keys() == ours.keys()
        for key, (latents, reference, metadata) in ours.items():
            np.testing.assert_array_equal(found[key][0], latents)
            np.testing.assert_array_equal(found[key][1].reshape(reference.shape), reference)
            known = {n: v for n, v in found[key][2].items() if v is not None}
            assert known == {n: v for n, v in metadata.items() if v is not None}
            assert metadata["text"] and metadata["speaker"]
            assert abs(metadata["target_duration"] * 25 - len(latents)) <= 1


def test_training_on_all_of_them(prepared, tmp_path):
    paths = [str(prepared[name] / "train") for name in FORMATS]
    arguments = [*runs.TINY, f"--data.path={','.join(paths)}", "--training.steps=3"]
    run = runs.run(tmp_path, "mixed", arguments)
    assert sorted(run.metrics()) == [1, 2, 3]
    assert "70 samples" in run.log.read_text()


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_two_workers_give_the_same_bytes_as_one(engine, tmp_path):
    source = corpora.write_webdataset(tmp_path / "wds", corpora.speech(each=3))
    found = []
    for name, workers in (("local", 1), (engine, 2)):
        output = tmp_path / f"{name}{workers}"
        record = corpora.prepare(source, output, **SETTINGS, engine=name, workers=workers)
        found.append((record["shards"], record["summary"]))
    assert found[0] == found[1]


def test_killed_preparation_goes_on_to_the_same_bytes(tmp_path):
    """Killed as a whole while it encodes and while it writes shards."""
    corpus = corpora.write_webdataset(tmp_path / "wds", corpora.speech(each=25))
    found = []
    for name in ("unbroken", "killed"):
        output, log = tmp_path / name, tmp_path / f"{name}.log"
        given = ["prepare", corpus, output, "--chunk-items", "2", "--samples-per-shard", "2"]
        for made in ("chunks/*.json", "train/*.tar") if name == "killed" else ():
            running = forked.start_titan_tts(*given, "--workers", "2", log=log)
            while len([*tmp_path.glob(f"{name}.partial/{made}")]) < 9:
                assert running.poll() is None, forked.tail(log)
                time.sleep(0.005)
            running.kill()
        assert forked.start_titan_tts(*given, log=log).wait() == 0, forked.tail(log)
        tars = output.glob("*/*.tar")
        found.append({str(path.relative_to(output)): path.read_bytes() for path in tars})
    assert found[0] == found[1] and len(found[0]) >= 52
