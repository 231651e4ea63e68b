"""Ranks that would train on different data, or of which one failed, stop together."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.helpers.loaders import CHANNELS, config
from tests.helpers.tokens import byte_tokenizer
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts import train_spec
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.collectives import (
    assert_equal_across_ranks,
    run_on_all_ranks,
    share_of,
)
from torchtitan.models.dit_tts.infra.text_encoder import fetch_together
from torchtitan.models.dit_tts.train_spec import build_agreed_dataloader


@pytest.fixture
def second_rank(monkeypatch):
    """Adds a second rank, which gives `other(mine)` to every gathering; returns the groups that gather."""

    def put(other, rank=0):
        groups = []

        def gather(gathered, mine, group=None):
            groups.append(group)
            gathered[:] = [mine, other(mine)] if rank == 0 else [other(mine), mine]

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        return groups

    return put


@pytest.mark.parametrize("rank", [0, 1])
def test_every_part_has_to_agree(second_rank, rank):
    parts = {"samples": "a", "tokens": "b", "steps": 4}
    second_rank(lambda mine: mine, rank)
    assert_equal_across_ranks(parts)
    for name in parts:
        second_rank(lambda mine: {**mine, name: 7}, rank)
        for what in ((), ("run folder",)):
            words = f"rank 1 .* its {name} is .* the same {''.join(what) or 'shards in'}"
            with pytest.raises(InputError, match=words):
                assert_equal_across_ranks(parts, *what)


def test_data_tokens_and_steps_are_compared(second_rank, tmp_path):
    folder = str(make_shards(tmp_path / "data", 60, seed=1, channels=CHANNELS))
    given = []
    second_rank(lambda mine: given.append(mine) or mine)
    tokenizer = byte_tokenizer()
    for change in ({"epochs": 2}, {"epochs": 3}, {"seed": 9}):
        job = config(folder, local=4, total=8, **change)
        build_agreed_dataloader(2, 0, tokenizer, job).close()
        assert given[-1]["steps"] == job.training.steps
    first, longer, reordered = given
    assert first["tokens"] == tokenizer.vocabulary.fingerprint
    assert longer == {**first, "steps": longer["steps"]} != first
    assert {**reordered, "steps": first["steps"]} != first


def test_every_rank_has_as_many_parts_of_the_work_and_each_counts_once():
    assert share_of(3, 0, 1) == [(0, True), (1, True), (2, True)]
    assert [share_of(3, rank, 2) for rank in range(2)] == [
        [(0, True), (2, True)],
        [(1, True), (0, False)],
    ]
    assert [share_of(2, rank, 3) for rank in range(3)] == [[(0, True)], [(1, True)], [(0, False)]]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all(second_rank, rank):
    def fail(rank):
        raise ValueError("no disk")

    told = []
    second_rank(lambda mine: told.append(mine) or ("its result", None), rank)
    found = run_on_all_ranks(lambda number: number, "read")
    assert found == ([0, "its result"] if rank == 0 else ["its result", 1])
    with pytest.raises(ValueError, match="no disk"):  # the rank's own error
        run_on_all_ranks(fail, "read")
    assert told == [(rank, None), (None, "no disk")]  # the other rank waits for both
    second_rank(lambda mine: (None, "no disk"), rank)
    with pytest.raises(InputError, match=f"rank {1 - rank} could not read: no disk"):
        run_on_all_ranks(lambda number: number, "read")


def test_downloads_and_fits_wait_for_days(second_rank, monkeypatch, tmp_path):
    """The default groups give up after minutes."""
    made, ended = [], []
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how) or f"group {len(made)}")
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    groups = second_rank(lambda mine: mine)
    data = make_shards(tmp_path / "data", 8, channels=CHANNELS)
    job = load_config([f"--data.path={data}", f"--data.latent_channels={CHANNELS}"])
    job.job.dump_folder = str(tmp_path)
    train_spec._ready_durations(job)
    assert train_spec._new_aligner(job, byte_tokenizer()) is not None
    monkeypatch.setenv("LOCAL_RANK", "1")
    fetch_together(SimpleNamespace(model="x", fingerprint=lambda dtype: "f"), "float32")
    assert ended == ["group 1", "group 2", "group 3"]
    assert groups == ["group 1", "group 2", "group 3"]
    assert all(how["timeout"] > timedelta(days=1) for how in made)
