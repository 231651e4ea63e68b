"""`titan-tts data push`: shards on the Hugging Face hub, with a card."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from torchtitan.models.dit_tts.errors import show


@dataclass(frozen=True)
class Options:
    """Upload shards to a dataset of the Hugging Face hub, from where training can read them as hf://OWNER/NAME."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """Output of titan-tts prepare or titan-tts data export."""

    name: Annotated[Positional[str], arg(metavar="OWNER/NAME")]
    """Dataset of the hub, a new one or your own."""

    public: bool = False
    """Publish it; without it the dataset is, and has to be, private."""

    replace: bool = False
    """Delete shards of the dataset that FOLDER lacks."""

    license: str = "unknown"
    """Licence of the recordings for the card, such as cc-by-4.0."""

    card_only: bool = False
    """Write FOLDER/README.md, and upload nothing."""


def run(options: Options) -> int:
    from titan_tts.share.push import push

    for line in push(options):
        show(line)
    return 0
