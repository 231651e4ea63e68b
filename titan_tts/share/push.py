"""Uploads a folder of shards to the hub."""

from glob import escape
from pathlib import Path

from titan_tts.share.card import card, hub_url
from titan_tts.share.contents import (
    PARQUET,
    files,
    open_shards,
    private_columns,
    read_state,
)
from titan_tts.share.options import PushOptions
from titan_tts.speak.hub import is_hub_name, upload_folder
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import SHARD_SUFFIX, write_atomic
from torchtitan.models.dit_tts.speech.codec.record import RECORD_NAME
from torchtitan.models.dit_tts.text.vocabulary import named

CARD = "README.md"
_KINDS = SHARD_SUFFIX, PARQUET


def push(options: PushOptions) -> list[str]:
    """Writes the card, if there is none, and uploads what is not there yet. Returns what was done, in sentences."""
    folder, name = Path(options.folder), options.name
    require(is_hub_name(name), f"{name}: is no name of the hub; give OWNER/NAME")
    about = "give an output of titan-tts prepare or titan-tts data export"
    require(folder.is_dir(), f"{folder}: is no folder; {about}")
    shards = files(folder)
    if read_state(folder) is None:  # an export has left it out
        _check_private(folder, list(shards))
    path = folder / CARD
    done = [f"{path} is kept as it is; remove it to have it written anew"]
    if not path.exists():
        write_atomic(path, card(options))
        done = [f"{path} is written; fill in whose voices they are, and the licence"]
    if options.card_only:
        return done
    names = {CARD, RECORD_NAME, *shards, *(f"{shard}.idx" for shard in shards)}

    def choose(is_private: bool, there: list[str]) -> tuple[list[str], list[str]]:
        require(
            is_private != options.public,
            f"{name}: is {'private' if is_private else 'public'}, and an upload does not change that; "
            f"{'leave out' if options.public else 'give'} --public, give another name, or change it on the hub",
        )
        shards_there = {n for n in there if n.removesuffix(".idx").endswith(_KINDS)}
        stale = sorted(shards_there - names)
        also = f"{name}: {named(stale, 3)} there, but not in {folder}, would be trained on, too"
        advice = "give --replace to delete what is not in the folder, or another name"
        require(options.replace or not stale, f"{also}; {advice}")
        if CARD in there:
            done.append(f"{CARD} of {name} is kept as it is; edit it on the hub")
        return list(map(escape, names - ({CARD} & set(there)))), list(map(escape, stale))

    address = upload_folder(
        folder, name, choose, not options.public, "titan-tts data push", kind="dataset"
    )
    if next(iter(shards)).endswith(PARQUET):
        return [*done, address]
    return [*done, address, f"train on it:  titan-tts train CONFIG --data.path {hub_url(options)}"]


def _check_private(folder: Path, shards: list[str]) -> None:
    """Refuses shards with private columns in the samples' JSON."""
    dataset = open_shards(str(folder / shard) for shard in shards)
    for sample in range(len(dataset)):
        if found := private_columns(dataset.metadata(sample)):
            raise InputError(
                f"{folder}: the JSON of sample '{dataset.sample_id(sample)}' has {named(found, 3)} (a person, a path "
                f"of a machine, or a password); push what titan-tts data export {folder} OUT --to parquet makes, which "
                "leaves them out"
            )
