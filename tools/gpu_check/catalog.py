"""All items of a check, in the order in which they are measured."""

import torch

from tools.gpu_check import block, ceilings, numerics, steps
from tools.gpu_check.items import Item, Settings

ITEMS = {
    "step": steps.items,
    "ceilings": ceilings.items,
    "block": block.items,
    "numerics": numerics.items,
    "goodput": steps.goodput_items,
}


def catalog(settings: Settings) -> list[Item]:
    """Items of the chosen groups, group by group as the caller gave them."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = [item for group in settings.groups for item in ITEMS[group](settings)]
    return [item for item in found if settings.only in item.name]
