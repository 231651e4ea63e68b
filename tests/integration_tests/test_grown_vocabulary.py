"""A run that starts from weights which lack some of its tokens."""

import json
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp

from tools.harness import runs
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data.shard_writer import write_shard

EMBEDDING = "text_encoder.embedding.weight"
FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]


def write_data(folder, speakers, text):
    samples = make_samples(24)
    for number, sample in enumerate(samples):
        metadata = {**sample.metadata, "speaker": speakers[number % 2], "text": text}
        samples[number] = replace(sample, metadata=metadata)
    folder.mkdir()
    write_shard(folder / "000000.tar", samples)
    return f"--data.path={folder}"


def rows_of(run, step=1):
    """Name of each token -> its row of the embedding."""
    vocabulary = json.loads((run.folder / "tokenizer.json").read_text())
    names = ["pad", "begin", "end", "?", *vocabulary["characters"], *vocabulary.get("added", [])]
    for field in vocabulary["conditioning"]:
        names += [f"{field['field']}?", *field["values"]]
    table = {EMBEDDING: torch.empty(len(names), 128)}
    dcp.load(table, checkpoint_id=run.folder / f"checkpoint/step-{step}", no_dist=True)
    return dict(zip(names, table[EMBEDDING], strict=True))


def test_each_token_keeps_its_row(tmp_path):
    """New letters, speakers and added tokens, from sharded weights to sharded ones."""
    old = write_data(tmp_path / "old", ("m", "q"), "one two three")
    new = write_data(tmp_path / "new", ("k", "m"), "[S1] Zwölf (laugh) one")
    common = [*runs.TINY, *FSDP, "--encoder.model=chars", "--data.conditioning=speaker"]
    # A first step of warm-up at such a rate leaves the weights as they are.
    common += ["--training.steps=1", "--optimizer.lr=1e-12", "--ema.no-enable"]
    base = runs.run(tmp_path, "base", [*common, old], 2)
    start = f"--checkpoint.initial_load_path={base.folder / 'checkpoint/step-1'}"
    # Another seed, so that no row is alike by chance.
    grown = [*common, new, start, "--encoder.added_tokens=[S1],(laugh)", "--debug.seed=8"]
    tuned = runs.run(tmp_path, "tuned", grown, 2)
    before, now = rows_of(base), rows_of(tuned)
    # The letters of the added tokens are counted in, as shards know their characters and not their words; marks that the
    # weights do not know are read as others.
    assert now.keys() == before.keys() | {*"S1 Zwölf laugh one", "k", "[S1]", "(laugh)"}
    beginnings = {**dict.fromkeys("Zlöf", "?"), "k": "speaker?"}
    for token in (*before, *beginnings):
        expected = before[beginnings.get(token, token)]
        torch.testing.assert_close(now[token], expected, rtol=0, atol=1e-9)
    assert now["[S1]"].std() > 0.1 * before["o"].std()
    assert not (now["[S1]"] == now["(laugh)"]).any()
    # A second life has the same vocabulary, and data that fits it.
    again = runs.run(tmp_path, "tuned", [*grown, "--training.steps=2"], 2)
    assert list(again.metrics()) == [1, 2]
