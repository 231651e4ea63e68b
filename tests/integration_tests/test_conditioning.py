"""A run with conditioning tokens over characters: trains, resumes on two ranks, speaks, refuses."""

import json

import pytest
import soundfile
import tyro

from tools.harness import runs
from tools.harness.synthetic import make_samples, make_shards
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.inference import generate_command
from torchtitan.models.dit_tts.inference.load_run import load_run

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


def test_it_speaks_as_the_tokens_say(trained):
    folder, run = trained
    out = folder / "out.wav"
    words = ["--speaker=s1", "--text=one two", "--duration=0.8", "--out", out]
    generate(run.folder, *words)
    said, rate = soundfile.read(out)
    assert (rate, len(said)) == (16000, 12800)
    # The same voice and length, another speaker's token.
    generate(run.folder, "--condition=speaker=s2", *words)
    other = soundfile.read(out)[0]
    assert len(other) == len(said) and abs(other - said).max() > 1e-4


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--text=one", "--condition=speaker=s9"], ["speaker 's9'", "'s0', 's1', 's2', 's3'"]),
        (["--text=one", "--condition=language=en"], ["language=en", "of the run: speaker"]),
        (["--text=oné"], ["--text", "'é'"]),
    ],
)
def test_it_says_what_it_does_not_know(trained, arguments, words):
    _, run = trained
    with pytest.raises(InputError) as caught:
        generate(run.folder, "--speaker=s1", *arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_resume_on_data_with_a_new_speaker_is_refused(trained):
    folder, run = trained
    samples = make_samples(16, seed=4)
    samples[3].metadata["speaker"] = "newcomer"
    (folder / "more").mkdir()
    write_shard(folder / "more" / "000000.tar", samples)
    files = [path for path in run.folder.glob("*.*") if path.name != "state.json"]
    before = {path: path.read_bytes() for path in files}
    more = ["--data.path", str(folder / "more"), "--training.steps=6"]
    refused = runs.start(folder, "run", [*CONDITIONED, *more])
    assert refused.wait() == 2
    [sentence] = [line for line in refused.log.read_text().splitlines() if line[:6] == "error:"]
    assert "1 values of 'speaker'" in sentence and "('newcomer')" in sentence
    assert "Traceback" not in refused.log.read_text()
    assert before == {path: path.read_bytes() for path in before}
