"""A run's tokenizer. It is built once, from the data, and stored in the run's folder; later starts read it there."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.bounded import read_bytes
from torchtitan.models.dit_tts.config.exported import is_exported
from torchtitan.models.dit_tts.config.job_config import Data, JobConfig
from torchtitan.models.dit_tts.data.dataset import Dataset, open_training_data
from torchtitan.models.dit_tts.errors import InputError, reading
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.text.aligner import ALIGNER_FILE, Aligner, load_aligner
from torchtitan.models.dit_tts.text.conventions import mark_table
from torchtitan.models.dit_tts.text.hf_tokenizer import (
    SubwordTokenizer,
    TextTokenizer,
    load_subword_tokenizer,
)
from torchtitan.models.dit_tts.text.normalize import Normalizer
from torchtitan.models.dit_tts.text.phones import Phonemizer
from torchtitan.models.dit_tts.text.token_counts import read_texts
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import (
    SUBWORDS,
    Subwords,
    Vocabulary,
    check_covers,
    from_json,
    grown,
    language_of,
    make_vocabulary,
    missing_tokens,
    moved,
    read_in,
    to_json,
    unit_of,
)
from torchtitan.tools.logging import logger

TOKENIZER_FILE = "tokenizer.json"
TEXT_TOKENIZER_FILE = "text_tokenizer.json"
"""the tokenizer of a pretrained encoder, as the `tokenizers` library stores it"""

_PHONE_TEXTS = 5000


def build_tokenizer(
    config: JobConfig, find_aligner: Callable[[ConditionedTokenizer], Aligner] | None = None
) -> ConditionedTokenizer:
    """The run's tokenizer, as upstream's `build_tokenizer_fn`: from the run's own files, from the files of its initial
    weights, or from its data and its encoder. Every rank builds the same one by itself; rank 0 writes the files where there
    are no weights yet. The number of ids is written to `config.encoder.vocab_size`, by which upstream sizes the model.

    `find_aligner` is called on every rank at once, with the tokenizer without an aligner, where there are no weights yet
    and [model] text_positions = "aligned"; None: the tokenizer has none.
    """
    import torch.distributed as dist

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    folder = Path(config.job.dump_folder)
    weights = origin_of_weights(config, folder)
    trained = load_vocabulary(weights) if weights is not None else None
    text, subwords = _text_tokenizer(config.encoder.model, weights, trained)
    needed = data_vocabulary(config, (rank, ranks), subwords)
    vocabulary, aligner = needed, None
    aligned = config.model.text_positions == "aligned"
    if trained is not None:
        assert weights is not None
        if not moved(trained, needed):  # what is read as another letter needs none of its own
            alike = mark_table(trained.characters, bool(trained.language))
            needed = replace(needed, characters=needed.characters.translate(dict.fromkeys(alike)))
        missing = missing_tokens(trained, needed)
        moves = moved(trained, needed)
        grows = weights != folder and bool(missing or moves)
        check_covers(trained, needed, f"the run in {weights}", may_grow=grows)
        vocabulary = grown(trained, needed) if grows else trained
        new = set(needed.characters) - set(trained.characters)
        if grows and rank == 0:
            missing = missing or "no token"
            if moves:
                missing += f"; texts are read as {needed.model}, no longer as {trained.model}"
            advice = (
                "; nothing needs to be done, but rare ones are best left out of the texts"
                if new
                else ""
            )
            logger.warning(
                f"new for the weights of {weights}, and to be learned: {missing}{advice}"
            )
        # Weights of a run without positions may begin one with them ([resume] allow).
        # A few new letters have no Gaussian; where most are new, the recordings teach them.
        known = 2 * len(new) <= len(needed.characters)
        if aligned and (weights == folder or (known and (weights / ALIGNER_FILE).exists())):
            aligner = load_aligner(weights)
    if aligner is None and find_aligner is not None and aligned:
        aligner = find_aligner(_tokenizer_of(vocabulary, text, config))
    given = config.encoder.vocab_size
    if given not in (0, vocabulary.size):
        raise InputError(
            f"[encoder] vocab_size = {given}, but the tokenizer has {vocabulary.describe()}; set it to 0"
        )
    tokenizer = _tokenizer_of(vocabulary, text, config, aligner)
    if weights != folder and rank == 0:
        if text is not None:
            write_atomic(folder / TEXT_TOKENIZER_FILE, text.to_json())
        if aligner is not None:
            aligner.save(folder)
        write_atomic(folder / TOKENIZER_FILE, to_json(vocabulary))
    if rank == 0:
        logger.info(f"tokenizer: {vocabulary.describe()}")
    config.encoder.vocab_size = vocabulary.size
    return tokenizer


def _text_tokenizer(
    model: str, weights: Path | None, trained: Vocabulary | None
) -> tuple[TextTokenizer | None, Subwords | None]:
    """(the text tokenizer to use, its ids), for a pretrained encoder: those that the weights were trained with, whose
    files are in `weights` and whose vocabulary is `trained`, whatever [encoder] model has now."""
    if unit_of(model) != SUBWORDS:
        return None, None
    if trained is None or weights is None:
        own = load_subword_tokenizer(model)
        return own.text, own.vocabulary.subwords
    if trained.subwords is None:  # `check_covers` refuses other units
        return None, Subwords(0, "", model=model)
    return load_text_tokenizer(weights, trained), replace(trained.subwords, model=model)


def _tokenizer_of(
    vocabulary: Vocabulary,
    text: TextTokenizer | None,
    config: JobConfig,
    aligner: Aligner | None = None,
) -> ConditionedTokenizer:
    dropout = config.data.conditioning_dropout
    if text is None:
        return UnitTokenizer(vocabulary, dropout, aligner)
    return SubwordTokenizer(vocabulary, text, dropout, aligner)


def data_vocabulary(
    config: JobConfig, part: tuple[int, int] = (0, 1), subwords: Subwords | None = None
) -> Vocabulary:
    """The vocabulary that the config asks for, with these ids of a pretrained encoder. The data is opened (`part` as in
    `open_dataset`) only if the vocabulary depends on it."""
    data, encoder, unit = config.data, config.encoder, unit_of(config.encoder.model)
    labels = [name for name in data.conditioning if name != "duration"]
    characters, values = "", {}
    language = language_of(encoder.model)
    if unit == "chars" or language or labels:
        dataset = open_training_data(data, part)
        words = Normalizer(encoder.normalize, AddedTokens(encoder.added_tokens))
        characters = "" if language else dataset.characters
        if language or (unit == "chars" and words.language):
            characters += _spoken_characters(dataset, words, language)
        values = {name: _trained_values(data, dataset, name) for name in labels}
    return make_vocabulary(
        unit,
        characters,
        data.conditioning,
        values,
        duration_token_seconds=data.duration_token_seconds,
        max_seconds=data.max_frames / data.frames_per_second,
        subwords=subwords,
        language=language,
        added=tuple(encoder.added_tokens),
        convention=encoder.convention,
        normalize=encoder.normalize,
    )


def _spoken_characters(dataset: Dataset, words: Normalizer, language: str) -> str:
    """The characters of an even selection of texts as words, or of their phones. A language has few dozen."""
    chosen = np.unique(
        np.linspace(0, len(dataset) - 1, min(len(dataset), _PHONE_TEXTS)).astype(np.int64)
    )
    spell = Phonemizer(language) if language else str
    read = chain(*read_texts(dataset, chosen.tolist()))
    texts = (words.added.without(words(text or "")) for text in read)
    return "".join({c for text in texts for c in spell(text)})


def _trained_values(data: Data, dataset: Dataset, name: str) -> list[str]:
    """Values of a label in the samples that are trained, by [data] max_frames."""
    codes, values = dataset.labels(name)
    used = codes[dataset.frames <= data.max_frames]
    return [values[code] for code in np.unique(used[used >= 0])]


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a trained run. A run without the file is of a version that had only bytes."""
    if not (folder / TOKENIZER_FILE).exists():
        return Vocabulary()
    return from_json(_read(folder / TOKENIZER_FILE), str(folder / TOKENIZER_FILE))


def load_text_tokenizer(folder: Path, vocabulary: Vocabulary) -> TextTokenizer:
    """The tokenizer of the pretrained encoder, from the folder of a run that has `vocabulary`."""
    assert vocabulary.subwords is not None
    path = folder / TEXT_TOKENIZER_FILE
    contents = _read(path)
    with reading(path, "restore the file that the run wrote"):
        text = TextTokenizer(contents)
    if text.fingerprint != vocabulary.subwords.text_fingerprint:
        raise InputError(
            f"{path} is not the tokenizer that the run wrote: its fingerprint is {text.fingerprint}, but "
            f"{TOKENIZER_FILE} has {vocabulary.subwords.text_fingerprint}; restore it"
        )
    return text


def _read(path: Path) -> str:
    with reading(path, "restore the file that the run wrote"):
        return str(read_bytes(path), "utf-8")


def load_tokenizer(folder: Path, config: JobConfig, encoder: str = "") -> ConditionedTokenizer:
    """The tokenizer of the trained run in `folder`, from the run's files and resolved config. `encoder`: "phones:LANGUAGE" to
    read texts in another language than the run."""
    vocabulary = load_vocabulary(folder)
    model = config.encoder.model
    wanted = [vocabulary.model if unit_of(model) == SUBWORDS else model, *config.data.conditioning]
    if [vocabulary.model, *vocabulary.conditioning] != wanted or vocabulary.unit != unit_of(model):
        raise InputError(
            f"{folder / TOKENIZER_FILE} has {vocabulary.describe()}, or is missing, where config.toml has [encoder] "
            f"model = {model!r} and [data] conditioning = {config.data.conditioning}; restore the run's file"
        )
    text = load_text_tokenizer(folder, vocabulary) if vocabulary.subwords else None
    aligner = load_aligner(folder) if config.model.text_positions == "aligned" else None
    if language_of(encoder):
        vocabulary = read_in(vocabulary, encoder)
    elif encoder and vocabulary.language and not Path(encoder).exists():  # "es"
        raise InputError(
            f"--encoder = {encoder!r}, but this model reads {model}; give phones:LANGUAGE, or leave it out"
        )
    return _tokenizer_of(vocabulary, text, config, aligner)


def origin_of_weights(config: JobConfig, folder: Path) -> Path | None:
    """The folder of the run, or the exported folder, whose weights are loaded; None for new weights."""
    # Any name of the checkpoint folder counts, so that a file is never replaced that weights rely on.
    # A save that a kill cut short, step-N.saving, does not count.
    if any(not path.parent.suffix for path in folder.glob("*/step-*/.metadata")):
        return folder
    if config.checkpoint.initial_load_path:
        given = Path(config.checkpoint.initial_load_path).resolve()
        if is_exported(given):
            return given
        origin = given.parent.parent
        # A checkpoint outside its run's folder does not say which tokens it knows.
        if (origin / TOKENIZER_FILE).is_file() or (origin / "config.toml").is_file():
            return origin
    return None
