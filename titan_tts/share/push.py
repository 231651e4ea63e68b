"""Uploads a folder of shards to the hub."""

from pathlib import Path

from titan_tts.share.card import card, files_in, hub_url
from titan_tts.share.contents import STATE_NAME, read_state
from titan_tts.share.options import PushOptions
from titan_tts.speak.hub import is_hub_name, upload_folder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import SHARD_SUFFIXES, write_atomic
from torchtitan.models.dit_tts.speech.codec.record import RECORD_NAME

CARD = "README.md"
_PATTERNS = [f"*{suffix}{end}" for suffix in SHARD_SUFFIXES for end in ("", ".idx")]
_PATTERNS += [CARD, RECORD_NAME, STATE_NAME]


def push(options: PushOptions) -> list[str]:
    """Writes the card, if there is none, and uploads what is not there yet. Returns what was done, in sentences."""
    folder = Path(options.folder)
    if not is_hub_name(options.name):
        raise InputError(f"{options.name}: is no name of the hub; give OWNER/NAME")
    if not folder.is_dir():
        raise InputError(
            f"{folder}: is no folder; give an output of titan-tts prepare or titan-tts data export"
        )
    files, wanted = len(files_in(folder)), (read_state(folder) or {}).get("files")
    if wanted not in (None, files):
        raise InputError(
            f"{folder}: has {files} files of an export of {wanted}; run titan-tts data export again"
        )
    path = folder / CARD
    done = [f"{path} is kept as it is; remove it to have it written anew"]
    if not path.exists():
        write_atomic(path, card(options))
        done = [f"{path} is written; fill in whose voices they are, and the licence"]
    if options.card_only:
        return done
    address = upload_folder(
        folder, options.name, _PATTERNS, options.private, "titan-tts data push", kind="dataset"
    )
    return [*done, address, f"train on it:  titan-tts train CONFIG --data.path {hub_url(options)}"]
