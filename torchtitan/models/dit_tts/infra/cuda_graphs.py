"""A sampler's passes through the network as CUDA graphs: the host launches each as one, not kernel by kernel."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from torchtitan.models.dit_tts.model.attention_backends import GuidedKeys
from torchtitan.models.dit_tts.model.conditions import Conditions
from torchtitan.models.dit_tts.model.model import BlockCache, DiTTTSModel

Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""Of a function whose inputs stay where they are: what runs it again, and its output, which that overwrites"""


def record_graph(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """Records what a function launches on this device. Without `torch.cuda.graph`, which would free all cached memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # what compiles, or chooses a kernel by trying, does it here
        # Other threads, which decode sounds, may allocate meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, output


class _Pass(NamedTuple):
    latents: torch.Tensor
    t: torch.Tensor
    modulations: list[torch.Tensor]
    """inputs in memory of their own, into which those of each step are copied"""

    replay: Callable[[], object]
    output: torch.Tensor
    read: Any
    """what else a graph reads, by its address"""


class RecordedPasses:
    """`DiTTTSModel.denoise_guided`, recorded for each `keys` of a batch (copies of guidance, scale of the speaker) at the
    first step that has it, and replayed at the others. Of a batch's steps, latents, time and modulation differ; conditions
    and the caches' keys and values are the same tensors."""

    def __init__(self, network: Callable[..., torch.Tensor], record: Recorder = record_graph):
        self.network, self.record = network, record
        self.conditions: Conditions | None = None
        self.passes: dict[int, _Pass] = {}

    def __call__(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        keys: GuidedKeys,
        conditions: Conditions,
        frames: torch.Tensor,
        caches: list[BlockCache] | None = None,
    ) -> torch.Tensor:
        if caches is None:  # of a sharded model, whose weights are gathered anew
            return self.network(latents, t, keys, conditions, frames)
        if conditions is not self.conditions:
            self.conditions, self.passes = conditions, {}
        modulations = [cache.modulation for cache in caches]
        if id(keys) not in self.passes:
            mine = latents.clone(), t.clone(), [each.clone() for each in modulations]
            own = [BlockCache(c.key_values, m) for c, m in zip(caches, mine[2], strict=True)]
            again, output = self.record(
                lambda: self.network(mine[0], mine[1], keys, conditions, frames, own)
            )
            self.passes[id(keys)] = _Pass(*mine, again, output, (keys, frames, own))
        found = self.passes[id(keys)]
        found.latents.copy_(latents)
        found.t.copy_(t)
        torch._foreach_copy_(found.modulations, modulations)
        found.replay()
        return found.output.clone()


def record_passes(model: DiTTTSModel, record: Recorder = record_graph) -> None:
    """Lets a sampler's model record and replay its passes."""
    cast(Any, model).denoise_guided = RecordedPasses(model.denoise_guided, record)
