"""A run's tokenizer: made from the data, stored in the run's folder, binding for its weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from tests.helpers.sentences import refused
from tests.helpers.tokens import token
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.text.build_tokenizer import (
    TEXT_TOKENIZER_FILE,
    TOKENIZER_FILE,
    build_tokenizer,
    load_tokenizer,
)
from torchtitan.models.dit_tts.text.hf_tokenizer import TextTokenizer
from torchtitan.models.dit_tts.text.vocabulary import CharWidths, to_json

CONDITIONED = ["--encoder.model=chars", "--data.conditioning=speaker,duration"]
SMALL_BATCHES = [
    "--data.num_workers=0",
    "--data.num_buckets=2",
    "--training.local_batch_size=8",
    "--training.global_batch_size=8",
]


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
def t5(tmp_path_factory):
    return write_tiny_t5(tmp_path_factory.mktemp("models") / "t5")


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


# A new run


def test_plain_bytes_open_no_data(tmp_path):
    config = config_of("/nowhere", tmp_path)
    tokenizer = build_tokenizer(config)
    assert config.encoder.vocab_size == tokenizer.vocab_size == 259
    assert json.loads((tmp_path / TOKENIZER_FILE).read_text())["unit"] == "bytes"
    assert load_tokenizer(tmp_path, config).vocabulary == tokenizer.vocabulary


def test_tokens_come_from_the_data_and_are_stored_in_the_folder(data, tmp_path):
    build_tokenizer(config_of(data, tmp_path / "run"))  # a start that fails binds nobody
    config = config_of(data, tmp_path / "run", *CONDITIONED)
    tokenizer = build_tokenizer(config)
    vocabulary = tokenizer.vocabulary
    assert vocabulary.conditioning["speaker"] == ("s0", "s1", "s2", "s3")
    assert len(vocabulary.conditioning["duration"]) == 62  # 768 frames are 30.72 s
    assert set("zero nine") < set(vocabulary.characters) < set("abcdefghijklmnopqrstuvwxyz ")
    assert tokenizer.conditioning_dropout == 0.1
    assert config.encoder.vocab_size == vocabulary.size
    assert [path.name for path in (tmp_path / "run").iterdir()] == [TOKENIZER_FILE]
    assert load_tokenizer(tmp_path / "run", config).vocabulary == vocabulary


def test_char_widths_are_measured_once_and_belongs_to_the_weights(data, tmp_path):
    found = []

    def measure_char_widths():
        found.append(CharWidths(tuple(0.5 + i / 8 for i in range(256)), 1.5 + len(found)))
        return found[-1]

    positions = "--model.text_positions=scaled"
    plain = build_tokenizer(config_of(data, tmp_path / "plain"), measure_char_widths)
    assert found == [] and plain.vocabulary.char_widths is None
    config = config_of(data, tmp_path / "run", positions)
    first = build_tokenizer(config, measure_char_widths)
    assert [first.vocabulary.char_widths] == found
    assert load_tokenizer(tmp_path / "run", config).vocabulary == first.vocabulary
    checkpoint = add_checkpoint(tmp_path / "run")
    loading = [f"--checkpoint.initial_load_path={checkpoint}", positions]
    for folder, arguments in (("run", [positions]), ("tuned", loading)):
        again = build_tokenizer(config_of(data, tmp_path / folder, *arguments), measure_char_widths)
        assert again.vocabulary == first.vocabulary and len(found) == 1


def test_other_ranks_find_the_same_and_write_nothing(data, tmp_path, monkeypatch):
    config = config_of(data, tmp_path / "run", *CONDITIONED)
    for name, value in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    other = build_tokenizer(config)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert other.vocabulary == build_tokenizer(config).vocabulary


@pytest.mark.long
def test_a_number_of_ids_that_is_not_the_tokenizers(data, tmp_path):
    config = config_of(data, tmp_path, "--encoder.vocab_size=300")
    refused(lambda: build_tokenizer(config), "vocab_size = 300", "set it to 0")
    size = build_tokenizer(config_of(data, tmp_path, *CONDITIONED)).vocab_size
    build_tokenizer(config_of(data, tmp_path, *CONDITIONED, f"--encoder.vocab_size={size}"))


@pytest.mark.long
def test_speakers_have_a_token_if_they_are_trained(tmp_path):
    """A sample as long as the limit is trained, a longer one is left out or cropped."""
    samples = make_samples(24, seed=1)
    longest = max(samples, key=lambda sample: len(sample.latents))
    longest.metadata["speaker"] = "longest"
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/000000.tar", samples)
    frames = len(longest.latents)
    for limit, on_too_long, known in (
        (frames, "drop", True),
        (frames - 1, "drop", False),
        (frames - 1, "crop", True),
    ):
        arguments = [f"--data.max_frames={limit}", f"--data.on_too_long={on_too_long}"]
        config = config_of(tmp_path / "data", tmp_path / "run", *CONDITIONED, *arguments)
        values = build_tokenizer(config).vocabulary.conditioning["speaker"]
        assert ("longest" in values) == known


# A resumed run


@pytest.mark.long
def test_a_resume_takes_the_runs_own_tokens(data, tmp_path):
    run = tmp_path / "run"
    first = build_tokenizer(config_of(data, run, *CONDITIONED))
    add_checkpoint(run)
    before = written(run)
    fewer = write_data(tmp_path / "fewer", speakers=["s2"], text="nine", n=8)
    config = config_of(fewer, run, *CONDITIONED, "--data.max_frames=400")
    again = build_tokenizer(config)
    assert again.vocabulary == first.vocabulary and config.encoder.vocab_size == first.vocab_size
    assert written(run) == before


@pytest.mark.long
def test_a_resume_with_new_tokens_is_refused(data, tmp_path):
    run = tmp_path / "run"
    build_tokenizer(config_of(data, run, *CONDITIONED))
    add_checkpoint(run)
    before = written(run)
    speakers = write_data(tmp_path / "speakers", speakers=["s0", "x1", "x2"])
    where = f"the run in {run} was"
    for config, words in (
        (config_of(speakers, run, *CONDITIONED), ["2 values of 'speaker'", "'x1', 'x2'"]),
        (config_of(data, run), ["[encoder] model = 'bytes'", "'chars'"]),
    ):
        refused(lambda: build_tokenizer(config), where, *words)
    assert written(run) == before


@pytest.mark.long
def test_a_run_of_a_version_without_the_file(data, tmp_path):
    add_checkpoint(tmp_path)
    config = config_of(data, tmp_path)
    assert build_tokenizer(config).vocab_size == 259
    assert load_tokenizer(tmp_path, config).vocab_size == 259
    conditioned = config_of(data, tmp_path, *CONDITIONED)
    refused(lambda: load_tokenizer(tmp_path, conditioned), TOKENIZER_FILE, "missing", "restore")


# Weights of another run


@pytest.mark.long
def test_initial_weights_bring_their_tokens(data, tmp_path):
    first = build_tokenizer(config_of(data, tmp_path / "a", *CONDITIONED))
    checkpoint = add_checkpoint(tmp_path / "a")
    fewer = write_data(tmp_path / "fewer", speakers=["s2"], text="nine", n=8)
    more = write_data(tmp_path / "more", speakers=["s2", "new"], text="nine", n=8)
    loading = [*CONDITIONED, "--checkpoint.initial_load_path"]
    config = config_of(fewer, tmp_path / "b", *loading, str(checkpoint))
    assert build_tokenizer(config).vocabulary == first.vocabulary
    assert load_tokenizer(tmp_path / "b", config).vocabulary == first.vocabulary
    # A checkpoint outside its run's folder does not say which tokens it knows.
    config = config_of(more, tmp_path / "d", *loading, str(add_checkpoint(tmp_path / "elsewhere")))
    assert build_tokenizer(config).vocabulary.conditioning["speaker"] == ("new", "s2")


# With a pretrained encoder


@pytest.mark.long
def test_a_run_and_its_weights_outlive_the_model(data, t5, tmp_path):
    copied = shutil.copytree(t5, tmp_path / "model")
    run = tmp_path / "run"
    arguments = [f"--encoder.model={copied}", "--data.conditioning=speaker"]
    config = config_of(data, run, *arguments)
    first = build_tokenizer(config)
    assert config.encoder.vocab_size == first.vocab_size == 512 + 5
    assert set(written(run)) == {TEXT_TOKENIZER_FILE, TOKENIZER_FILE}
    checkpoint = add_checkpoint(run)
    before = written(run)
    shutil.rmtree(copied)
    loading = [f"--checkpoint.initial_load_path={checkpoint}"]
    for again in (
        load_tokenizer(run, config),
        build_tokenizer(config_of(data, run, *arguments)),
        build_tokenizer(config_of(data, tmp_path / "b", *arguments, *loading)),
    ):
        assert again.vocabulary == first.vocabulary and again.pad_id == first.pad_id
        assert again.text_fingerprint == first.text_fingerprint
        for text in ("", "one two </s> Füße"):
            assert again.encode(text, {"speaker": "s1"}) == first.encode(text, {"speaker": "s1"})
    assert written(run) == before


@pytest.mark.long
def test_a_resume_with_another_tokenizer_is_refused(data, t5, tmp_path):
    copied = shutil.copytree(t5, tmp_path / "model")
    run = tmp_path / "run"
    build_tokenizer(config_of(data, run, f"--encoder.model={copied}"))
    add_checkpoint(run)
    renamed = config_of(data, run, f"--encoder.model={t5}")
    assert build_tokenizer(renamed).vocabulary.model == str(copied)  # the same under another name
    where = f"the run in {run} was"
    config = config_of(data, run, "--encoder.model=chars")
    refused(lambda: build_tokenizer(config), where, "'chars'", f"'{copied}'")
    # The model's files have changed since the run began.
    config = config_of(data, run, f"--encoder.model={copied}")
    for name, old, new in (
        ("config.json", '"vocab_size": 512', '"vocab_size": 500'),
        ("tokenizer.json", '"type_id": 0', '"type_id": 1'),
    ):
        stored = (copied / name).read_text()
        assert old in stored
        (copied / name).write_text(stored.replace(old, new, 1))
        refused(lambda: build_tokenizer(config), str(copied), where, "restore")
        (copied / name).write_text(stored)


@pytest.mark.long
def test_a_run_outlives_the_library_that_wrote_its_tokenizer(data, t5, tmp_path):
    config = config_of(data, tmp_path, f"--encoder.model={t5}")
    first = build_tokenizer(config)
    add_checkpoint(tmp_path)
    contents = json.loads((tmp_path / TEXT_TOKENIZER_FILE).read_text())
    merges = contents["model"]["merges"]
    contents["model"]["merges"] = [" ".join(pair) for pair in merges]  # as versions before 0.20 did
    old = TextTokenizer(json.dumps(contents))
    assert old.fingerprint != first.text_fingerprint and old.to_json() == first.text.to_json()
    (tmp_path / TEXT_TOKENIZER_FILE).write_text(json.dumps(contents))
    subwords = replace(first.vocabulary.subwords, text_fingerprint=old.fingerprint)
    (tmp_path / TOKENIZER_FILE).write_text(to_json(replace(first.vocabulary, subwords=subwords)))
    again = build_tokenizer(config_of(data, tmp_path, f"--encoder.model={t5}"))
    assert again.text_fingerprint == old.fingerprint
    assert again.text_ids("one two") == first.text_ids("one two")


@pytest.mark.long
def test_corrupt_files_of_a_run(data, t5, tmp_path):
    build_tokenizer(config_of(data, tmp_path, f"--encoder.model={t5}"))
    add_checkpoint(tmp_path)
    config = config_of(data, tmp_path, f"--encoder.model={t5}")
    calls = (lambda: build_tokenizer(config), lambda: load_tokenizer(tmp_path, config))
    text_file, file = tmp_path / TEXT_TOKENIZER_FILE, tmp_path / TOKENIZER_FILE
    stored, vocabulary = text_file.read_text(), file.read_text()
    # The last one is valid, and gives other ids.
    other = json.dumps(json.loads(stored) | {"normalizer": {"type": "Lowercase"}})
    for corrupt in ("", "{}", stored.replace("zero", "zerq"), other, None):
        text_file.unlink() if corrupt is None else text_file.write_text(corrupt)
        for call in calls:
            refused(call, str(text_file), "restore")
    text_file.write_text(stored)
    for corrupt in (vocabulary.replace('"base": 512', '"base": 600').encode(), b"\xff\xfe"):
        file.write_bytes(corrupt)
        for call in calls:
            refused(call, str(file), "restore")
    file.write_text(vocabulary)
    assert load_tokenizer(tmp_path, config).base == 512


# In the loader


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_loader_puts_conditions_before_the_text(data, t5, tmp_path, pretrained):
    model = t5 if pretrained else "chars"
    arguments = [*CONDITIONED, *SMALL_BATCHES, "--data.conditioning_dropout=0.3"]
    config = config_of(data, tmp_path, *arguments, f"--encoder.model={model}")
    tokenizer = build_tokenizer(config)
    loader = build_dataloader(1, 0, tokenizer, config)
    dataset = loader.dataset
    metadata_of = {dataset.sample_id(n): dataset.metadata(n) for n in range(len(dataset))}
    widths = [L for _, L, _ in loader.policy.shapes]
    assert max(widths) == -(-int(tokenizer.max_tokens(dataset).max()) // 8) * 8
    first = 0 if pretrained else 1  # behind the token that begins a text
    seen = set()
    for _, (batch, _) in zip(range(6), loader):
        drop = tokenizer.dropped(0, int(batch["global_batch"]), batch["row"].numpy())
        ids, mask = batch["text_ids"].numpy(), batch["text_mask"].numpy()
        assert ids.shape == mask.shape and ids.shape[1] in widths
        for row, sample_id in enumerate(batch["sample_id"]):
            metadata = metadata_of[sample_id]
            expected = tokenizer.encode(metadata["text"], metadata, drop[row])
            n = len(expected)
            assert ids[row, :n].tolist() == expected and mask[row, :n].all()
            assert (ids[row, n:] == tokenizer.pad_id).all() and not mask[row, n:].any()
            names = [token(tokenizer.vocabulary, i) for i in ids[row, first : first + 2]]
            assert (names[1] == "<duration:?>") == drop[row, 1]
            speaker = "?" if drop[row, 0] else metadata.get("speaker", "?")
            assert names[0] == f"<speaker:{speaker}>"
            seen.add((bool(drop[row, 0]), "speaker" in metadata))
    assert len(seen) == 4
