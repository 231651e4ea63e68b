"""The tokenizer of a run: made from its data once, kept in the run's folder, and then what counts."""

from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.conditioning.tokenizer import Tokenizer
from torchtitan.models.dit_tts.conditioning.vocabulary import (
    Vocabulary,
    check_covers,
    from_json,
    make_vocabulary,
    to_json,
)
from torchtitan.models.dit_tts.data.archive import Dataset
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.data.shard_writer import atomic_file
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.job_config import Data, JobConfig
from torchtitan.tools.logging import logger

FILE_NAME = "tokenizer.json"


def build_tokenizer(job_config: JobConfig) -> Tokenizer:
    """The run's tokenizer, as upstream's `build_tokenizer_fn`.

    Upstream sizes the model from the config right after this call and hands nothing else on, so the
    number of ids is written to `job_config.encoder.vocab_size`.
    """
    import torch.distributed as dist

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokenizer = resolve_tokenizer(job_config, Path(job_config.job.dump_folder), rank, ranks)
    job_config.encoder.vocab_size = tokenizer.vocab_size
    return tokenizer


def resolve_tokenizer(config: JobConfig, folder: Path, rank: int, ranks: int) -> Tokenizer:
    """The tokenizer of the run in `folder`: its own file's, its initial weights', or its data's.

    Every rank comes to the same one by itself; rank 0 writes the file where there are no weights yet.

    Raises:
        InputError: the config or its data need a token that the weights do not know, the data lacks
            what the config asks for, or [encoder] vocab_size is another number.
    """
    needed = data_vocabulary(config, (rank, ranks))
    weights = _origin_of_weights(config, folder)
    vocabulary = needed
    if weights is not None:
        vocabulary = load_vocabulary(weights)
        check_covers(vocabulary, needed, f"the run in {weights}")
    given = config.encoder.vocab_size
    if given not in (0, vocabulary.size):
        raise InputError(
            f"[encoder] vocab_size = {given}, but the tokenizer has {vocabulary.describe()}; set it to "
            f"0, which takes the tokenizer's number"
        )
    if weights != folder and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / FILE_NAME) as file:
            file.write(to_json(vocabulary).encode("utf-8"))
    if rank == 0:
        logger.info(f"tokenizer: {vocabulary.describe()}")
    return Tokenizer(vocabulary, config.data.conditioning_dropout)


def data_vocabulary(config: JobConfig, part: tuple[int, int] = (0, 1)) -> Vocabulary:
    """The vocabulary that the config asks for, with what its data has; `part` as in `open_dataset`.

    Data that it does not depend on is not opened.
    """
    data, unit = config.data, config.encoder.model
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
    )


def _trained_values(data: Data, dataset: Dataset, name: str) -> list[str]:
    """Values of a label that samples within [data] max_frames have; the others are not trained."""
    codes, values = dataset.labels(name)
    used = codes if data.overlong == "crop" else codes[dataset.frames <= data.max_frames]
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


def load_tokenizer(folder: Path, config: JobConfig) -> Tokenizer:
    """The tokenizer of the trained run in `folder`, whose resolved config is `config`.

    Raises:
        InputError: as `load_vocabulary`, or no file where the config needs one.
    """
    vocabulary = load_vocabulary(folder)
    wanted = [config.encoder.model, *config.data.conditioning]
    if [vocabulary.unit, *vocabulary.conditioning] != wanted:
        raise InputError(
            f"{folder / FILE_NAME} has {vocabulary.describe()}, or is missing, where the run's "
            f"config.toml has [encoder] model = {config.encoder.model!r} and [data] conditioning = "
            f"{config.data.conditioning}; restore the file that the run wrote"
        )
    return Tokenizer(vocabulary, config.data.conditioning_dropout)


def _origin_of_weights(config: JobConfig, folder: Path) -> Path | None:
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
