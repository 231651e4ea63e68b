"""`titan-tts data push`: shards on the Hugging Face hub, with a card."""

from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.files import SHARD_SUFFIX, write_atomic

CARD = "README.md"


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
    """Writes the card, if there is none, and uploads what is not there yet."""
    from titan_tts.prepare.work_folder import RECORD_NAME
    from titan_tts.share.card import card, hub_url
    from titan_tts.share.contents import PARQUET, files, read_state
    from titan_tts.speak.hub import is_hub_name, upload_folder
    from torchtitan.models.dit_tts.text.vocabulary import named

    folder, name = Path(options.folder), options.name
    require(is_hub_name(name), f"{name}: is no name of the hub; give OWNER/NAME")
    about = "give an output of titan-tts prepare or titan-tts data export"
    require(folder.is_dir(), f"{folder}: is no folder; {about}")
    shards = files(folder)
    if read_state(folder) is None:  # an export has left it out
        _check_private(folder, list(shards))
    path = folder / CARD
    if path.exists():
        show(f"{path} is kept as it is; remove it to have it written anew")
    else:
        write_atomic(path, card(options.folder, name, options.license, shards))
        show(f"{path} is written; fill in whose voices they are, and the licence")
    if options.card_only:
        return 0
    names = {CARD, RECORD_NAME, *shards, *(f"{shard}.idx" for shard in shards)}

    def choose(is_private: bool, there: list[str]) -> tuple[list[str], list[str]]:
        require(
            is_private != options.public,
            f"{name}: is {'private' if is_private else 'public'}, and an upload does not change that; "
            f"{'leave out' if options.public else 'give'} --public, give another name, or change it on the hub",
        )
        kinds = SHARD_SUFFIX, PARQUET
        stale = sorted({n for n in there if n.removesuffix(".idx").endswith(kinds)} - names)
        also = f"{name}: {named(stale, 3)} there, but not in {folder}, would be trained on, too"
        advice = "give --replace to delete what is not in the folder, or another name"
        require(options.replace or not stale, f"{also}; {advice}")
        if CARD in there:
            show(f"{CARD} of {name} is kept as it is; edit it on the hub")
        return list(map(escape, names - ({CARD} & set(there)))), list(map(escape, stale))

    why = "titan-tts data push"
    show(upload_folder(folder, name, choose, not options.public, why, kind="dataset"))
    if not next(iter(shards)).endswith(PARQUET):
        show(f"train on it:  titan-tts train CONFIG --data.path {hub_url(options.folder, name)}")
    return 0


def _check_private(folder: Path, shards: list[str]) -> None:
    """Refuses shards with private columns in the samples' JSON."""
    from titan_tts.share.contents import open_shards, private_columns
    from torchtitan.models.dit_tts.text.vocabulary import named

    dataset = open_shards(str(folder / shard) for shard in shards)
    for sample in range(len(dataset)):
        if found := private_columns(dataset.metadata(sample)):
            raise InputError(
                f"{folder}: the JSON of sample '{dataset.sample_id(sample)}' has {named(found, 3)} (a person, a path "
                f"of a machine, or a password); push what titan-tts data export {folder} OUT --to parquet makes"
            )
