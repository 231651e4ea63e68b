"""Chooses the language in which `titan-tts finetune` reads the texts, and the fraction of recordings that it holds out."""

from dataclasses import replace
from pathlib import Path

from titan_tts.finetune.settings import Options
from titan_tts.prepare.formats import open_corpus
from titan_tts.prepare.listing import is_wanted
from titan_tts.prepare.settings import Options as Preparing
from titan_tts.records.columns import drawn
from titan_tts.records.utterance import Utterance
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.data.heldout import split_of
from torchtitan.models.dit_tts.errors import InputError, require, show
from torchtitan.models.dit_tts.speech.scoring.word_errors import language_code
from torchtitan.models.dit_tts.text.normalize import LANGUAGES
from torchtitan.models.dit_tts.text.phones import Phonemizer
from torchtitan.models.dit_tts.text.vocabulary import language_of

_NAMES = {"en": "en-us", "fr": "fr-fr", "no": "nb", "zh": "cmn"}
"""Language code -> espeak-ng's name, where it has another"""

_NOBODY = "\0"  # no list has that name

_HELD_OUT = 12
"""recordings, if a third is not less: two may be left out before a training warns that they are few (FEW_SAMPLES)"""


def encoder_keys(options: Options, config: JobConfig) -> dict[str, str]:
    """The keys of [encoder] by which the texts are read: the base's, or those of their language."""
    model, normalize = config.encoder.model, str(config.encoder.normalize)
    of_base = language_of(model)
    require(
        bool(of_base)
        or not (options.language and Path(options.recordings, "prepare.json").is_file()),
        f"--language is for recordings, but {options.recordings} is prepared already; leave it out",
    )
    language = _language(options, config) if of_base else ""
    short = language_code(language) if language else ""
    name = _NAMES.get(short, short)
    if 0 < len(short) <= 3 and name.split("-")[0] != of_base.split("-")[0]:
        try:  # a region that espeak-ng tells apart
            code = Phonemizer(language.lower().replace("_", "-")).language
        except InputError:
            code = Phonemizer(name).language  # or an error that lists all languages
        show(f"the base reads {model}; texts in {language} are read as phones:{code}")
        new = f"the texts are in {language!r}, which {options.base} does not read"
        require(options.method == "full", f"{new}, nor an adapter learns; give --method full")
        require(not options.keep, f"{new}, as data of --keep are in its own; leave --keep out")
        model, normalize = f"phones:{code}", short if normalize and short in LANGUAGES else ""
    return {"encoder.model": model, "encoder.normalize": normalize}


def _language(options: Options, config: JobConfig) -> str:
    """--language, else the one that the recordings name, if that is one."""
    if options.language:
        return options.language
    if Path(options.recordings, "prepare.json").is_file():
        train = replace(config.data, path=str(Path(options.recordings, "train")), weights=[])
        names = set(open_training_data(train).labels("language")[1])
    else:
        names = {str(item.labels.get("language") or "") for item in _listed(options)} - {""}
    return names.pop() if len(names) == 1 else ""


def _listed(options: Options) -> list[Utterance]:
    """The recordings that --where takes; none where that cannot be listed, which `prepare` tells, below the command that has
    the options to name."""
    speaker = options.speaker or _NOBODY
    preparing = Preparing(options.recordings, "", speaker=speaker, format=options.format)
    try:
        listed = [item for item in open_corpus(preparing).items() if isinstance(item, Utterance)]
    except InputError:
        return []
    return [item for item in listed if is_wanted(item, options.where)]


def fraction_held_out(options: Options) -> float:
    """The fraction by which `prepare` holds out the number that the help names; 0 where the list has its own splits."""
    items = _listed(options)
    named = all(item.speaker != _NOBODY for item in items)
    require(named, f"{options.recordings}: has no speakers; name the voice by --speaker NAME")
    if len(items) < 2 or any(item.split == "heldout" for item in items):
        return 0.0
    free = [item for item in items if split_of(item.labels.get("split")) is None]
    one_split = f"{options.recordings}: its column split names train alone"
    require(len(free) > 1, f"{one_split}; name some rows heldout, or leave the column out")
    draws = sorted(drawn(item.id, Preparing.seed) for item in free)
    count = max(1, len(free) // 10, min(_HELD_OUT, len(free) // 3))
    return (draws[count - 1] + draws[count]) / 2
