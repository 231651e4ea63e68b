"""A run's tokenizer: made from the data, stored in the run's folder, binding for its weights."""

import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers.sentences import refused
from tests.helpers.tokens import token
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.text.aligner import ALIGNER_FILE, choose_recordings, fit_aligner
from torchtitan.models.dit_tts.text.build_tokenizer import (
    TEXT_TOKENIZER_FILE,
    TOKENIZER_FILE,
    build_tokenizer,
    load_tokenizer,
)

CONDITIONED = ["--encoder.model=chars", "--data.conditioning=speaker,duration"]
INITIAL = "--checkpoint.initial_load_path"


def write_data(folder, speakers=("s0", "s1", "s2", "s3"), text=None, n=24):
    """Shards of synthetic speech with these speakers, every sixth sample without one."""
    samples = make_samples(n, seed=1)
    for number, sample in enumerate(samples):
        sample.metadata["speaker"] = speakers[number % len(speakers)]
        if number % 6 == 5:
            del sample.metadata["speaker"]
        if text is not None:
            sample.metadata["text"] = text
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        write_shard(folder / f"{shard:06d}.tar", samples[shard::2])
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("tokens") / "data")


@pytest.fixture(scope="module")
def t5(checkpoints):
    return checkpoints["t5"]


def config_of(data, folder, *arguments):
    config = load_config([f"--data.path={data}", *arguments])
    config.job.dump_folder = str(folder)
    return config


def add_checkpoint(folder, step=3):
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")
    return path


def written(folder):
    """Changes when a file of the run is written again, even with equal content."""
    found = [(path.name, path.stat()) for path in folder.glob("*.json")]
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found}


@pytest.mark.long
def test_tokens_come_from_the_data_and_are_stored_in_the_folder(data, tmp_path, monkeypatch):
    build_tokenizer(config_of("/nowhere", tmp_path))  # plain bytes open no data
    assert json.loads((tmp_path / TOKENIZER_FILE).read_text())["unit"] == "bytes"
    config = config_of(data, tmp_path, *CONDITIONED)  # a start that failed binds nobody
    tokenizer = build_tokenizer(config)
    vocabulary = tokenizer.vocabulary
    assert vocabulary.conditioning["speaker"] == ("s0", "s1", "s2", "s3")
    assert len(vocabulary.conditioning["duration"]) == 62  # 768 frames are 30.72 s
    assert set("zero nine") < set(vocabulary.characters) < set("abcdefghijklmnopqrstuvwxyz ")
    assert config.encoder.vocab_size == vocabulary.size
    assert [path.name for path in tmp_path.iterdir()] == [TOKENIZER_FILE]
    assert load_tokenizer(tmp_path, config).vocabulary == vocabulary
    sized = config_of(data, tmp_path, "--encoder.vocab_size=300")
    refused(lambda: build_tokenizer(sized), "vocab_size = 300", "set it to 0")
    bins = ["--data.frames_per_second=12.5", "--data.duration_token_seconds=0.25"]
    slow = config_of("/nowhere", tmp_path / "slow", "--data.conditioning=duration", *bins)
    # 768 frames are 61.44 s.
    assert build_tokenizer(slow).vocab_size == 259 + 1 + 246
    # Another rank finds the same and writes nothing.
    for name, value in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    other = build_tokenizer(config_of(data, tmp_path / "other", *CONDITIONED))
    assert other.vocabulary == vocabulary and not (tmp_path / "other").exists()


@pytest.mark.long
def test_an_aligner_is_learned_once_and_belongs_to_the_weights(data, tmp_path):
    found = []

    def find_aligner(tokenizer):
        assert tokenizer.spoken("Aé") == "Aé"
        found.append(fit_aligner(choose_recordings(open_dataset(str(data)), 10**6)))
        return found[-1]

    positions = "--model.text_positions=aligned"
    assert build_tokenizer(config_of(data, tmp_path / "plain"), find_aligner).aligner is None
    config = config_of(data, tmp_path / "run", positions)
    first = build_tokenizer(config, find_aligner)
    assert [first.aligner] == found
    loading = [f"{INITIAL}={add_checkpoint(tmp_path / 'run')}", positions]
    for folder, arguments in (("run", [positions]), ("tuned", loading)):
        again = build_tokenizer(config_of(data, tmp_path / folder, *arguments), find_aligner)
        assert np.array_equal(again.text_positions("one two"), first.text_positions("one two"))
    assert len(found) == 1 and (tmp_path / "tuned" / ALIGNER_FILE).exists()
    # A run that starts from weights without places learns its own.
    plain = f"{INITIAL}={add_checkpoint(tmp_path / 'plain')}"
    late = build_tokenizer(config_of(data, tmp_path / "late", plain, positions), find_aligner)
    assert late.aligner is found[1] and (tmp_path / "late" / ALIGNER_FILE).exists()
    (tmp_path / "run" / ALIGNER_FILE).unlink()
    refused(lambda: build_tokenizer(config, find_aligner), ALIGNER_FILE, "restore")


@pytest.mark.long
def test_an_aligner_goes_on_where_most_letters_are_known(data, tmp_path):
    find = Mock(return_value=fit_aligner(choose_recordings(open_dataset(str(data)), 10**6)))
    aligned = ["--encoder.model=chars", "--model.text_positions=aligned"]
    build_tokenizer(config_of(data, tmp_path / "run", *aligned), find)
    aligned.append(f"{INITIAL}={add_checkpoint(tmp_path / 'run')}")
    for text, learned in (("one", 1), ("ж", 2)):
        few = write_data(tmp_path / f"data of {text}", text=text)
        build_tokenizer(config_of(few, tmp_path / text, *aligned), find)
        assert find.call_count == learned


@pytest.mark.long
def test_speakers_have_a_token_if_they_are_trained(tmp_path):
    """A sample as long as the limit is trained, a longer one is left out."""
    samples = make_samples(24, seed=1)
    longest = max(samples, key=lambda sample: len(sample.latents))
    longest.metadata["speaker"] = "longest"
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/000000.tar", samples)
    frames = len(longest.latents)
    for limit, known in ((frames, True), (frames - 1, False)):
        arguments = [*CONDITIONED, f"--data.max_frames={limit}"]
        config = config_of(tmp_path / "data", tmp_path / "run", *arguments)
        assert ("longest" in build_tokenizer(config).vocabulary.conditioning["speaker"]) == known


@pytest.mark.long
def test_weights_bring_their_tokens(data, tmp_path):
    """On a resume and for a new run; tokens that they do not know are refused, and nothing is written."""
    run = tmp_path / "run"
    first = build_tokenizer(config_of(data, run, *CONDITIONED))
    checkpoint = add_checkpoint(run)
    before = written(run)
    fewer = write_data(tmp_path / "fewer", speakers=["s2"], text="nine", n=8)
    for folder, arguments in (("run", []), ("new", [f"{INITIAL}={checkpoint}"])):
        config = config_of(fewer, tmp_path / folder, *CONDITIONED, *arguments)
        assert build_tokenizer(config).vocabulary == first.vocabulary
        assert config.encoder.vocab_size == first.vocab_size
        assert load_tokenizer(tmp_path / folder, config).vocabulary == first.vocabulary
    more = write_data(tmp_path / "more", speakers=["s0", "x1", "x2"], n=8)
    for config, words in (
        (config_of(more, run, *CONDITIONED), ["2 values of 'speaker'", "'x1', 'x2'"]),
        (config_of(data, run), ["[encoder] model = 'bytes'", "'chars'"]),
    ):
        refused(lambda: build_tokenizer(config), f"the run in {run} was", *words)
    assert written(run) == before
    # A run of a version without the file had bytes.
    add_checkpoint(tmp_path / "old")
    config = config_of(data, tmp_path / "old")
    assert build_tokenizer(config).vocab_size == 259
    conditioned = config_of(data, tmp_path / "old", *CONDITIONED)
    refused(lambda: load_tokenizer(tmp_path / "old", conditioned), TOKENIZER_FILE, "missing")


@pytest.mark.long
def test_a_run_outlives_its_pretrained_model(data, t5, tmp_path):
    copied = shutil.copytree(t5, tmp_path / "model")
    run = tmp_path / "run"
    arguments = [f"--encoder.model={copied}", "--data.conditioning=speaker"]
    config = config_of(data, run, *arguments)
    first = build_tokenizer(config)
    assert config.encoder.vocab_size == first.vocab_size == 512 + 5
    assert set(written(run)) == {TEXT_TOKENIZER_FILE, TOKENIZER_FILE}
    checkpoint = add_checkpoint(run)
    before = written(run)
    where = f"the run in {run} was"
    chars = config_of(data, run, "--encoder.model=chars", arguments[1])
    refused(lambda: build_tokenizer(chars), where, "'chars'", f"'{copied}'")
    shutil.rmtree(copied)
    for again in (
        load_tokenizer(run, config),
        build_tokenizer(config_of(data, run, *arguments)),
        build_tokenizer(config_of(data, tmp_path / "b", *arguments, f"{INITIAL}={checkpoint}")),
    ):
        assert again.vocabulary == first.vocabulary and again.pad_id == first.pad_id
        assert again.text_fingerprint == first.text_fingerprint
        for text in ("", "one two </s> Füße"):
            assert again.encode(text, {"speaker": "s1"}) == first.encode(text, {"speaker": "s1"})
    assert written(run) == before


@pytest.mark.long
def test_files_of_a_run_that_are_corrupt(data, t5, tmp_path):
    def config():
        return config_of(data, tmp_path, f"--encoder.model={t5}")

    build_tokenizer(config())
    add_checkpoint(tmp_path)
    text_file, file = tmp_path / TEXT_TOKENIZER_FILE, tmp_path / TOKENIZER_FILE
    stored, vocabulary = text_file.read_text(), file.read_text()
    # This one is valid, and gives other ids.
    other = json.dumps(json.loads(stored) | {"normalizer": {"type": "Lowercase"}})
    wrong = vocabulary.replace('"base": 512', '"base": 600')
    for path, content in ((text_file, "{}"), (text_file, other), (file, wrong), (file, "\x80")):
        path.write_text(content, "latin-1")
        refused(lambda: build_tokenizer(config()), str(path), "restore")
        refused(lambda: load_tokenizer(tmp_path, config()), str(path), "restore")
        text_file.write_text(stored)
        file.write_text(vocabulary)
    text_file.unlink()
    refused(lambda: load_tokenizer(tmp_path, config()), str(text_file), "restore")


def test_the_loader_puts_conditions_before_the_text(data, tmp_path):
    batches = "--training.local_batch_size=8", "--training.global_batch_size=8"
    arguments = [*CONDITIONED, *batches, "--data.num_workers=0", "--data.num_buckets=2"]
    config = config_of(data, tmp_path, *arguments, "--data.conditioning_dropout=0.3")
    tokenizer = build_tokenizer(config)
    loader = build_dataloader(1, 0, tokenizer, config)
    dataset = loader.dataset
    metadata_of = {dataset.sample_id(n): dataset.metadata(n) for n in range(len(dataset))}
    widths = [L for _, L, _ in loader.policy.shapes]
    assert max(widths) == -(-int(tokenizer.max_tokens(dataset).max()) // 8) * 8
    seen = set()
    for _, (batch, _) in zip(range(6), loader):
        drop = tokenizer.dropped(0, int(batch["global_batch"]), batch["row"].numpy())
        ids = batch["text_ids"].numpy()
        assert ids.shape[1] in widths
        for row, sample_id in enumerate(batch["sample_id"]):
            metadata, n = metadata_of[sample_id], int(batch["text_tokens"][row])
            assert ids[row, :n].tolist() == tokenizer.encode(metadata["text"], metadata, drop[row])
            assert (ids[row, n:] == tokenizer.pad_id).all()
            name = token(tokenizer.vocabulary, ids[row, 1])
            assert name == f"<speaker:{'?' if drop[row, 0] else metadata.get('speaker', '?')}>"
            seen.add((*drop[row], "speaker" in metadata))
    assert len(seen) == 8
