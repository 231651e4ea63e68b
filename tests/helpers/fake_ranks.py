"""The first rank of a layout as the only process: its process group exchanges nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torchtitan.distributed import ParallelDims, parallel_dims

from titan_tts.plan.step import Layout


@contextlib.contextmanager
def fake_process_group(layout: Layout) -> Iterator[ParallelDims]:
    """The dimensions of a layout, on the first of its ranks; collectives do nothing."""
    assert not dist.is_initialized(), "a process group would be replaced"
    degrees: Any = {"dp_replicate": layout.replicas, "dp_shard": layout.shards}
    degrees |= {"tp": layout.tensor, **dict.fromkeys(("cp", "pp", "ep", "etp"), 1)}
    dims = ParallelDims(**degrees, world_size=layout.gpus)
    if layout.gpus == 1:
        yield dims
        return
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=layout.gpus)
    # Upstream builds its mesh of accelerators where there are any, of whatever number.
    device_type, parallel_dims.device_type = parallel_dims.device_type, "cpu"
    try:
        dims.build_mesh()
        yield dims
    finally:
        parallel_dims.device_type = device_type
        dist.destroy_process_group()
