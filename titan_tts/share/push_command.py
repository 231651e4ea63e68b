"""`titan-tts data push`: shards on the Hugging Face hub, with a card."""

from titan_tts.share.options import PushOptions as Options
from torchtitan.models.dit_tts.errors import show


def run(options: Options) -> int:
    from titan_tts.share.push import push

    for line in push(options):
        show(line)
    return 0
