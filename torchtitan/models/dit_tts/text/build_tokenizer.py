"""The tokenizer of a run: made from its data once, kept in the run's folder, and then what counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.config.job_config import Data, JobConfig
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.text.hf_tokenizer import (
    SubwordTokenizer,
    TextTokenizer,
    load_subword_tokenizer,
)
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, Tokenizer
from torchtitan.models.dit_tts.text.vocabulary import (
    SUBWORDS,
    Subwords,
    Vocabulary,
    check_covers,
    from_json,
    make_vocabulary,
    to_json,
    unit_of,
)
from torchtitan.tools.logging import logger

FILE_NAME = "tokenizer.json"
TEXT_FILE_NAME = "text_tokenizer.json"
"""a pretrained encoder's own, as the `tokenizers` library stores it"""


def build_tokenizer(job_config: JobConfig) -> ConditionedTokenizer:
    """The run's tokenizer, as upstream's `build_tokenizer_fn`.

    Upstream sizes the model from the config right after this call and hands nothing else on, so the
    number of ids is written to `job_config.encoder.vocab_size`.
    """
    import torch.distributed as dist

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokenizer = resolve_tokenizer(job_config, Path(job_config.job.dump_folder), rank, ranks)
    job_config.encoder.vocab_size = tokenizer.vocab_size
    return tokenizer


def resolve_tokenizer(
    config: JobConfig, folder: Path, rank: int, ranks: int
) -> ConditionedTokenizer:
    """The tokenizer of the run in `folder`: its own files', its initial weights', or its data's and
    its encoder's.

    Every rank comes to the same one by itself; rank 0 writes the files where there are no weights yet.

    Raises:
        InputError: the config or its data need a token that the weights do not know, the data lacks
            what the config asks for, there is no tokenizer of [encoder] model, or [encoder]
            vocab_size is another number.
    """
    weights = origin_of_weights(config, folder)
    trained = load_vocabulary(weights) if weights is not None else None
    text, subwords = _text_tokenizer(config.encoder.model, weights, trained)
    needed = data_vocabulary(config, (rank, ranks), subwords)
    vocabulary = needed
    if trained is not None:
        check_covers(trained, needed, f"the run in {weights}")
        vocabulary = trained
    given = config.encoder.vocab_size
    if given not in (0, vocabulary.size):
        raise InputError(
            f"[encoder] vocab_size = {given}, but the tokenizer has {vocabulary.describe()}; set it to "
            f"0, which takes the tokenizer's number"
        )
    tokenizer = _tokenizer_of(vocabulary, text, config)
    if weights != folder and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if text is not None:
            with atomic_file(folder / TEXT_FILE_NAME) as file:
                file.write(text.to_json().encode("utf-8"))
        with atomic_file(folder / FILE_NAME) as file:
            file.write(to_json(vocabulary).encode("utf-8"))
    if rank == 0:
        logger.info(f"tokenizer: {vocabulary.describe()}")
    return tokenizer


def _text_tokenizer(
    model: str, weights: Path | None, trained: Vocabulary | None
) -> tuple[TextTokenizer | None, Subwords | None]:
    """(the tokenizer to use for text, the ids that [encoder] model has now) of a pretrained encoder.

    Args:
        weights: the run's folder that the weights come from, if there are any.
        trained: its vocabulary.
    """
    if unit_of(model) != SUBWORDS:
        return None, None
    if trained is None:
        own = load_subword_tokenizer(model)
        return own.text, own.vocabulary.subwords
    if trained.subwords is None:  # other units: no tokenizer need be found to say so
        return None, Subwords(0, "", model=model)
    text = load_text_tokenizer(weights, trained)
    try:
        now = load_subword_tokenizer(model, download=False)
    except InputError:  # no longer here, and not needed
        return text, trained.subwords
    subwords = now.vocabulary.subwords
    # One tokenizer, which two versions of its library wrote in two ways?
    if now.text_fingerprint == TextTokenizer(text.to_json()).fingerprint:
        subwords = replace(subwords, text_fingerprint=text.fingerprint)
    return text, subwords


def _tokenizer_of(
    vocabulary: Vocabulary, text: TextTokenizer | None, config: JobConfig
) -> ConditionedTokenizer:
    if text is None:
        return Tokenizer(vocabulary, config.data.conditioning_dropout)
    return SubwordTokenizer(vocabulary, text, config.data.conditioning_dropout)


def data_vocabulary(
    config: JobConfig, part: tuple[int, int] = (0, 1), subwords: Subwords | None = None
) -> Vocabulary:
    """The vocabulary that the config asks for, with what its data has.

    Data that it does not depend on is not opened.

    Args:
        part: as in `open_dataset`.
        subwords: the ids of text of a pretrained encoder.
    """
    data, unit = config.data, unit_of(config.encoder.model)
    if unit == "bytes" and not data.conditioning:
        return Vocabulary()
    labels = [name for name in data.conditioning if name != "duration"]
    dataset = open_training_data(data, part) if unit == "chars" or labels else None
    return make_vocabulary(
        unit,
        dataset.characters if dataset is not None else "",
        data.conditioning,
        {name: _trained_values(data, dataset, name) for name in labels},
        duration_token_seconds=data.duration_token_seconds,
        max_seconds=data.max_frames / data.frames_per_second,
        subwords=subwords,
    )


def _trained_values(data: Data, dataset: Dataset, name: str) -> list[str]:
    """Values of a label that samples within [data] max_frames have; the others are not trained."""
    codes, values = dataset.labels(name)
    used = codes if data.on_too_long == "crop" else codes[dataset.frames <= data.max_frames]
    return [values[code] for code in np.unique(used[used >= 0])]


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a trained run. One without the file is of a version that had only bytes.

    Raises:
        InputError: a file that cannot be read or was changed.
    """
    path = folder / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Vocabulary()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); restore the file that the run wrote"
        ) from error
    return from_json(text, str(path))


def load_text_tokenizer(folder: Path, vocabulary: Vocabulary) -> TextTokenizer:
    """The pretrained encoder's tokenizer that the run in `folder` keeps.

    Raises:
        InputError: no file, one that cannot be read, or one that `vocabulary` is not of.
    """
    assert vocabulary.subwords is not None
    path = folder / TEXT_FILE_NAME
    try:
        text = TextTokenizer(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); restore the file that the run wrote"
        ) from error
    if text.fingerprint != vocabulary.subwords.text_fingerprint:
        raise InputError(
            f"{path} is not the tokenizer that the run wrote: its fingerprint is {text.fingerprint} "
            f"where {FILE_NAME} has {vocabulary.subwords.text_fingerprint}; restore it, as the weights "
            f"know only the ids that it gave"
        )
    return text


def load_tokenizer(folder: Path, config: JobConfig) -> ConditionedTokenizer:
    """The tokenizer of the trained run in `folder`, whose resolved config is `config`. It takes
    nothing but the run's files.

    Raises:
        InputError: as `load_vocabulary` and `load_text_tokenizer`, or no file where the config needs
            one.
    """
    vocabulary = load_vocabulary(folder)
    wanted = [unit_of(config.encoder.model), *config.data.conditioning]
    if [vocabulary.unit, *vocabulary.conditioning] != wanted:
        raise InputError(
            f"{folder / FILE_NAME} has {vocabulary.describe()}, or is missing, where the run's "
            f"config.toml has [encoder] model = {config.encoder.model!r} and [data] conditioning = "
            f"{config.data.conditioning}; restore the file that the run wrote"
        )
    text = load_text_tokenizer(folder, vocabulary) if vocabulary.subwords else None
    return _tokenizer_of(vocabulary, text, config)


def origin_of_weights(config: JobConfig, folder: Path) -> Path | None:
    """The run's folder that the weights to be loaded come from; None for new weights."""
    # Under any name of the checkpoint folder: a file that weights rely on is never replaced.
    if any(folder.glob("*/step-*/.metadata")):
        return folder
    if config.checkpoint.enable and config.checkpoint.initial_load_path:
        origin = Path(config.checkpoint.initial_load_path).resolve().parent.parent
        # A checkpoint that was copied out of its run's folder tells nothing of its tokens.
        if (origin / FILE_NAME).is_file() or (origin / "config.toml").is_file():
            return origin
    return None
