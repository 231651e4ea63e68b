"""A run with conditioning tokens over characters: trains, resumes on two ranks, speaks."""

import json

import pytest
import soundfile
import tyro

from titan_tts.speak import generate_command
from titan_tts.speak.load_run import load_run
from tools.harness import runs
from tools.harness.synthetic import make_shards

CONDITIONED = [
    *runs.TINY,
    "--encoder.model=chars",
    "--data.conditioning=speaker,duration",
    "--checkpoint.interval=2",
]


def generate(*arguments: object) -> None:
    """`titan-tts generate` in this process."""
    args = [*map(str, arguments), "--sampling-steps=2"]
    generate_command.run(tyro.cli(generate_command.Options, args=args))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps on one rank, two more on two."""
    folder = tmp_path_factory.mktemp("conditioning")
    data = make_shards(folder / "data", 40, seed=4)
    arguments = [*CONDITIONED, "--data.path", str(data)]
    first = runs.run(folder, "run", [*arguments, "--training.steps=2"])
    tokens = (first.folder / "tokenizer.json").read_bytes()
    arguments += ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
    run = runs.run(folder, "run", [*arguments, "--training.steps=4"], processes=2)
    assert (run.folder / "tokenizer.json").read_bytes() == tokens
    return folder, run


def test_it_trains_and_resumes_on_two_ranks(trained):
    _, run = trained
    assert sorted(run.metrics()) == [1, 2, 3, 4]
    tokens = json.loads((run.folder / "tokenizer.json").read_text())
    assert tokens["conditioning"][0] == {"field": "speaker", "values": ["s0", "s1", "s2", "s3"]}
    loaded = load_run(run.folder)
    assert loaded.step == 4
    embedding = loaded.model.text_encoder.embedding
    assert embedding.num_embeddings == loaded.tokenizer.vocab_size == tokens["vocab_size"]
    assert f"vocab_size = {tokens['vocab_size']}" in (run.folder / "config.toml").read_text()


def test_tokens_change_the_speech(trained):
    folder, run = trained
    out = folder / "out.wav"
    words = ["--speaker=s1", "--text=one two", "--seconds=0.8", "--out", out]
    generate(run.folder, *words)
    said, rate = soundfile.read(out)
    assert (rate, len(said)) == (16000, 12800)
    # The same voice and length, another speaker's token.
    generate(run.folder, "--condition=speaker=s2", *words)
    other = soundfile.read(out)[0]
    assert len(other) == len(said) and abs(other - said).max() > 1e-4
