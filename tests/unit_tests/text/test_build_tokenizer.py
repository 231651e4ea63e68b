"""A run's tokenizer: made from the data, kept in the folder, binding for what loads its weights."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.synthetic import make_samples
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.build_tokenizer import (
    FILE_NAME,
    build_tokenizer,
    load_tokenizer,
    resolve_tokenizer,
)

CONDITIONED = ["--encoder.model=chars", "--data.conditioning=speaker,duration"]


def write_data(folder, speakers=("s0", "s1", "s2", "s3"), text=None, n=24):
    """Archives of synthetic speech with these speakers, every sixth sample without one."""
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
    """Changes when the run's file is written again, even with equal content."""
    found = (folder / FILE_NAME).stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def refused(call, *words):
    with pytest.raises(InputError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


# A new run


def test_plain_bytes_open_no_data(tmp_path):
    config = config_of("/nowhere", tmp_path)
    tokenizer = build_tokenizer(config)
    assert config.encoder.vocab_size == tokenizer.vocab_size == 259
    assert json.loads((tmp_path / FILE_NAME).read_text())["unit"] == "bytes"
    assert load_tokenizer(tmp_path, config).vocabulary == tokenizer.vocabulary


def test_tokens_come_from_the_data_and_are_kept_in_the_folder(data, tmp_path):
    config = config_of(data, tmp_path / "run", *CONDITIONED)
    tokenizer = build_tokenizer(config)
    vocabulary = tokenizer.vocabulary
    assert vocabulary.conditioning["speaker"] == ("s0", "s1", "s2", "s3")
    assert len(vocabulary.conditioning["duration"]) == 62  # 768 frames are 30.72 s
    assert set("zero nine") < set(vocabulary.characters) < set("abcdefghijklmnopqrstuvwxyz ")
    assert tokenizer.conditioning_dropout == 0.1
    assert config.encoder.vocab_size == vocabulary.size
    args = model_flavors()["debug"]
    args.update_from_config(config)
    assert args.text_vocab_size == vocabulary.size
    kept = (tmp_path / "run" / FILE_NAME).read_text("utf-8")
    assert '"s3"' in kept and "\n  " in kept
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE_NAME]
    assert load_tokenizer(tmp_path / "run", config).vocabulary == vocabulary


def test_other_ranks_find_the_same_and_write_nothing(data, tmp_path):
    config = config_of(data, tmp_path, *CONDITIONED)
    other = resolve_tokenizer(config, tmp_path / "r", rank=3, ranks=4)
    assert not (tmp_path / "r").exists()
    assert other.vocabulary == resolve_tokenizer(config, tmp_path / "r", rank=0, ranks=4).vocabulary


@pytest.mark.long
def test_a_failed_start_binds_nobody(data, tmp_path):
    build_tokenizer(config_of(data, tmp_path, "--encoder.model=chars"))
    tokenizer = build_tokenizer(config_of(data, tmp_path, *CONDITIONED))
    assert tokenizer.fields == ("speaker", "duration")
    assert load_tokenizer(tmp_path, config_of(data, tmp_path, *CONDITIONED)).fields


@pytest.mark.long
def test_a_number_of_ids_that_is_not_the_tokenizers(data, tmp_path):
    for given, arguments in ((300, []), (5, CONDITIONED)):
        config = config_of(data, tmp_path, *arguments, f"--encoder.vocab_size={given}")
        refused(lambda: build_tokenizer(config), f"vocab_size = {given}", "ids: ", "set it to 0")
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


def test_a_field_that_the_data_lacks(data, tmp_path):
    config = config_of(data, tmp_path, "--data.conditioning=speaker,quality")
    refused(lambda: build_tokenizer(config), "[data] conditioning", "'quality'", "no sample")


@pytest.mark.long
def test_a_model_whose_ids_nobody_has_counted():
    for arguments in (["--encoder.model=chars"], ["--data.conditioning=speaker"]):
        args = model_flavors()["debug"]
        refused(lambda: args.update_from_config(load_config(arguments)), "vocab_size = 0", "set it")


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
    before = (run / FILE_NAME).read_bytes()
    speakers = write_data(tmp_path / "speakers", speakers=["s0", "x1", "x2"])
    letters = write_data(tmp_path / "letters", text="nïne")
    where = f"the run in {run} was"
    for config, words in (
        (config_of(speakers, run, *CONDITIONED), ["2 values of 'speaker'", "'x1', 'x2'", where]),
        (config_of(letters, run, *CONDITIONED), ["1 characters", "'ï'", where, "new [job]"]),
        (config_of(data, run), ["[encoder] model = 'bytes'", "'chars'", where, "set it back"]),
        (
            config_of(data, run, CONDITIONED[0], "--data.conditioning=speaker"),
            ["[data] conditioning = ['speaker']", where],
        ),
        (
            config_of(data, run, *CONDITIONED, "--data.duration_token_seconds=1"),
            ["duration_token_seconds = 1", "0.5", where],
        ),
    ):
        refused(lambda: build_tokenizer(config), *words)
    assert (run / FILE_NAME).read_bytes() == before


@pytest.mark.long
def test_a_run_of_a_version_without_the_file(data, tmp_path):
    add_checkpoint(tmp_path)
    config = config_of(data, tmp_path)
    assert build_tokenizer(config).vocab_size == 259
    assert load_tokenizer(tmp_path, config).vocab_size == 259
    conditioned = config_of(data, tmp_path, *CONDITIONED)
    refused(lambda: build_tokenizer(conditioned), "[encoder] model = 'chars'", "with 'bytes'")
    refused(lambda: load_tokenizer(tmp_path, conditioned), FILE_NAME, "missing", "restore")


def test_a_damaged_file(data, tmp_path):
    config = config_of(data, tmp_path, *CONDITIONED)
    build_tokenizer(config)
    add_checkpoint(tmp_path)
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().replace('"s1"', '"s9"'))
    for call in (lambda: build_tokenizer(config), lambda: load_tokenizer(tmp_path, config)):
        refused(call, str(file), "was changed")
    file.write_bytes(b"\xff\xfe")
    refused(lambda: build_tokenizer(config), str(file), "cannot be read")


# Weights of another run


@pytest.mark.long
def test_initial_weights_bring_their_tokens(data, tmp_path):
    first = build_tokenizer(config_of(data, tmp_path / "a", *CONDITIONED))
    checkpoint = add_checkpoint(tmp_path / "a")
    fewer = write_data(tmp_path / "fewer", speakers=["s2"], text="nine", n=8)
    more = write_data(tmp_path / "more", speakers=["s2", "new"], text="nine", n=8)
    loading = [*CONDITIONED, "--checkpoint.enable", f"--checkpoint.initial_load_path={checkpoint}"]
    config = config_of(fewer, tmp_path / "b", *loading)
    assert build_tokenizer(config).vocabulary == first.vocabulary
    assert load_tokenizer(tmp_path / "b", config).vocabulary == first.vocabulary
    config = config_of(more, tmp_path / "c", *loading)
    refused(lambda: build_tokenizer(config), "'new'", f"the run in {tmp_path / 'a'} was")
    assert not (tmp_path / "c" / FILE_NAME).exists()
    # Weights alone, out of their run's folder, tell nothing of their tokens.
    copied = add_checkpoint(tmp_path / "elsewhere")
    config = config_of(
        more,
        tmp_path / "d",
        *CONDITIONED,
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={copied}",
    )
    assert build_tokenizer(config).vocabulary.conditioning["speaker"] == ("new", "s2")


# In the loader


def test_the_loader_puts_conditions_before_the_text(data, tmp_path):
    arguments = [
        *CONDITIONED,
        "--data.conditioning_dropout=0.3",
        "--data.num_workers=0",
        "--data.num_buckets=2",
        "--training.local_batch_size=8",
        "--training.global_batch_size=16",
    ]
    config = config_of(data, tmp_path, *arguments)
    tokenizer = build_tokenizer(config)
    whole = build_dataloader(1, 0, tokenizer, replace_batch(config, 16))
    ranks = [iter(build_dataloader(2, rank, tokenizer, config)) for rank in range(2)]
    dataset, ids_of = whole.dataset, {}
    for sample in range(len(dataset)):
        ids_of[dataset.sample_id(sample)] = dataset.metadata(sample)
    dropped = kept = missing = 0
    for _, (batch, _) in zip(range(4), whole):
        halves = [next(rank)[0]["text_ids"] for rank in ranks]
        assert (np.concatenate(halves) == batch["text_ids"].numpy()).all()
        drop = tokenizer.dropped(0, int(batch["global_batch"]), batch["row"].numpy())
        for row, sample_id in enumerate(batch["sample_id"]):
            metadata = ids_of[sample_id]
            count = int(batch["text_mask"][row].sum())
            ids = batch["text_ids"][row, :count].tolist()
            assert ids == tokenizer.encode(metadata["text"], metadata, drop[row])
            speaker, duration = map(tokenizer.vocabulary.token, ids[1:3])
            assert (duration == "<duration:?>") == drop[row, 1]
            assert speaker == (
                "<speaker:?>" if drop[row, 0] else f"<speaker:{metadata.get('speaker', '?')}>"
            )
            dropped += int(drop[row, 0])
            kept += speaker != "<speaker:?>"
            missing += "speaker" not in metadata
    assert dropped and kept and missing


def replace_batch(config, local_batch_size):
    training = replace(config.training, local_batch_size=local_batch_size)
    return replace(config, training=training)
