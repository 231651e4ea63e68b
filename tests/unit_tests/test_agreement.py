"""Ranks that would train on different data are told so, all of them."""

import pytest
import torch.distributed as dist

from tests.helpers.synthetic import make_shards
from tests.helpers.forked import run_ranks
from tests.helpers.loaders import CHANNELS, config
from torchtitan.models.dit_tts.conditioning.tokenizer import byte_tokenizer
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.agreement import build_agreed_dataloader


def start(rank: int, folders: list[str], rendezvous: str, epochs: list[int]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    job = config(folders[rank], local=4, total=8, epochs=epochs[rank])
    try:
        if len(set(folders)) == len(set(epochs)) == 1:
            assert build_agreed_dataloader(2, rank, byte_tokenizer(), job).consumed == 0
        else:
            with pytest.raises(InputError, match="rank 1 is about to train on other data than rank 0"):
                build_agreed_dataloader(2, rank, byte_tokenizer(), job)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("differs", ["nothing", "a shard", "steps"])
def test_both_ranks_refuse_what_differs(tmp_path, differs):
    one = str(make_shards(tmp_path / "one", 60, seed=1, channels=CHANNELS))
    two = str(make_shards(tmp_path / "two", 60, seed=2, channels=CHANNELS))
    folders = [one, two if differs == "a shard" else one]
    epochs = [2, 3 if differs == "steps" else 2]
    run_ranks(start, 2, folders, str(tmp_path / "rendezvous"), epochs)
