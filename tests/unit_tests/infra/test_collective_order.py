"""The order in which ranks ask for collectives while blocks compute. On a GPU each kind has a stream of its own, and
runs beside the computation that is requested after it."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import tensor_parallel_ranks as ranks
from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.small_models import full_inputs, random_model, small_args
from titan_tts.plan.memory import Layout
from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.parallelize import begin_micro_batch, parallelize_dit_tts

ARGS = small_args(text_vocab_size=8, latent_channels=8, n_layers=4)
FSDP, HSDP, DDP = (1, 4), (2, 2), (4, 1)
NEVER = "--parallelism.fsdp_reshard_after_forward=never"
LETTERS = {"_allgather_base_": "G", "_reduce_scatter_base_": "S", "allreduce_": "R"}


class Trace(TorchDispatchMode):
    """G gather, S reduce-scatter, R all-reduce, 0 to 3: this block begins its forward or backward pass."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.letters = ""
        for index, layer in enumerate(model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, i=index: self.add(str(i)))
            layer.mlp.register_full_backward_pre_hook(lambda *_, i=index: self.add(str(i)))

    def add(self, letter: str) -> None:
        self.letters += letter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in LETTERS:
            self.add(LETTERS[name])
        return func(*args, **(kwargs or {}))


def trace(dims, *arguments: str, micro_batches: int = 1) -> Trace:
    config = load_config(["--activation_checkpoint.mode=none", *arguments])
    model = parallelize_dit_tts(random_model(ARGS), dims, config)
    torch.manual_seed(dist.get_rank())
    with Trace(model) as found:
        for left in reversed(range(micro_batches)):
            begin_micro_batch(model, dims, config.parallelism, last=left == 0)
            inputs = full_inputs(ARGS, rows=2, frames=6, text=3, speaker=8)
            model(inputs.pop("latents"), inputs.pop("t"), **inputs).square().sum().backward()
    found.gradients = [each.grad.to_local() for each in model.parameters()]
    return found


def check(group) -> None:
    """group: from (replicas, shards) to a context with the dimensions of these four ranks."""
    step = "GGGG0G1G2G3G" + "SG3SG2SG1SG0SG" + "SSS"
    with group(*FSDP) as dims:
        # Forward the next block behind each, backward before each; head and block 3 stay gathered.
        assert trace(dims).letters == step
        # Where a forward pass leaves weights gathered, both are done once a step.
        again, kept = trace(dims, micro_batches=3), trace(dims, NEVER, micro_batches=3)
        assert again.letters == 3 * step
        assert kept.letters == "GGGG0G1G2G3G" + 2 * "32100123" + "S3S2S1S0SSSS"
        if group is on_gloo:  # what torch 2.11's fake ranks receive is whatever was in memory
            torch.testing.assert_close(kept.gradients, again.gradients)
    with group(*HSDP) as dims:
        # Replicas reduce in the last micro-batch, a block's shards before the next block's backward pass.
        reduced = "GGGG0G1G2G3G" + "SRG3SRG2SRG1SRG0SRG" + "SRSRSR"
        assert trace(dims, micro_batches=2).letters == step + reduced
    with group(*DDP) as dims:
        assert trace(dims, micro_batches=2).letters == "0123" + "3210" + "0123" + "3R2R1R0RRRR"


def on_fake_ranks(replicas: int, shards: int):
    return fake_process_group(Layout(replicas, shards))


def on_gloo(replicas: int, shards: int):
    return nullcontext(ranks.dims_of((replicas, shards, 1)))


def test_order_of_collectives_and_blocks():
    check(on_fake_ranks)


@pytest.mark.matrix
def test_order_of_collectives_and_blocks_on_gloo(tmp_path):
    run_ranks(ranks.run, 4, 4, tmp_path, [(check, (on_gloo,), {})])
