"""All items of a check, in the order in which they are measured."""

from tools.gpu_check import block, ceilings, numerics, sampling, steps
from tools.gpu_check.items import Item
from tools.gpu_check.settings import Settings

_ITEMS = {
    "step": steps.items,
    "ceilings": ceilings.items,
    "block": block.items,
    "numerics": numerics.items,
    "goodput": steps.goodput_items,
    "sampling": sampling.items,
}


def catalog(settings: Settings) -> list[Item]:
    """Those of the chosen groups, group by group as the caller gave them."""
    found = [item for group in settings.groups for item in _ITEMS[group](settings)]
    return [item for item in found if settings.only in item.name]
