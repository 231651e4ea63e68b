"""The host and device of each rank, so that a bad machine is known.

They travel through the process group's store, which works without collectives and after a timeout.
"""

import json
import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.infra.compat import get_default_store
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module


def describe_rank() -> dict[str, Any]:
    """This rank's host, process, device, and the device's free memory in GiB."""
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return {
        "rank": int(os.environ["RANK"]),
        "host": platform.node(),
        "pid": os.getpid(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "device": device_module.get_device_name(),
        "free_gib": round(free / 2**30, 1),
    }


def gather_ranks() -> list[dict[str, Any]]:
    """Descriptions of all ranks on rank 0, which logs them; empty on the others."""
    mine = describe_rank()
    if dist.get_world_size() == 1:
        return [mine]
    store = get_default_store()
    store.set(f"rank/{mine['rank']}", json.dumps(mine))
    if mine["rank"] != 0:
        return []
    ranks = [json.loads(store.get(f"rank/{rank}")) for rank in range(dist.get_world_size())]
    for each in ranks:
        logger.info(
            f"rank {each['rank']}: host {each['host']}, process {each['pid']}, device "
            f"{each['local_rank']}: {each['device']}, {each['free_gib']} GiB free"
        )
    return ranks


def with_host(rank: int) -> str:
    """`3 (host node7)`, or `3` if the rank's host is not known."""
    store = get_default_store()
    if not store.check([f"rank/{rank}"]):
        return str(rank)
    return f"{rank} (host {json.loads(store.get(f'rank/{rank}'))['host']})"
