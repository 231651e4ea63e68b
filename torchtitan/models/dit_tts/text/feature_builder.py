"""Makes the text features of a shard.

They are in memory until the file is written, which appears when it is complete, so a stopped job continues with
the shards that are missing.
"""

import numpy as np
import torch

from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.text.feature_store import (
    FeatureKind,
    feature_path,
    find_feature_file,
    write_feature_file,
)
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec
from torchtitan.models.dit_tts.text.hf_files import weight_files
from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.token_counts import read_texts

LONGEST_TEXT = 2048
"""tokens; a longer text has no features, as attention over one long text would need all memory"""

_TEXTS_AT_ONCE = 1024


def feature_kind(
    encoder: Encoder, tokenizer: SubwordTokenizer, source: HFEncoderSpec
) -> FeatureKind:
    """The features that [encoder] asks for; without a fingerprint where the weights are not here."""
    fingerprint = source.fingerprint(encoder.dtype) if weight_files(source.model) else None
    return FeatureKind(
        source.model,
        fingerprint,
        tokenizer.text_fingerprint,
        encoder.dtype,
        encoder.cache_dtype or encoder.dtype,
    )


def longest_text(source: HFEncoderSpec) -> int:
    """Tokens of the longest text that is encoded."""
    return min(LONGEST_TEXT, source.max_tokens or LONGEST_TEXT)


def make_shard_features(
    dataset: Dataset,
    shard: int,
    encoder: PretrainedTextEncoder,
    tokenizer: SubwordTokenizer,
    kind: FeatureKind,
) -> None:
    """Encodes the texts of one shard that has no features of this kind yet.

    Args:
        shard: number in the dataset.
        kind: with the encoder's fingerprint.
    """
    if find_feature_file(dataset, shard, kind) is not None:
        return
    first, end = np.searchsorted(dataset.shard, [shard, shard + 1]).tolist()
    texts = _token_ids(dataset, range(first, end), tokenizer)
    tokens = np.array([len(ids) for ids in texts], np.int32)
    longest = longest_text(encoder.source)
    encoded = iter(encoder.encode([ids for ids in texts if len(ids) <= longest]))
    features = [
        next(encoded).to(kind.torch_dtype) if len(ids) <= longest else None for ids in texts
    ]
    tar_path, digest = dataset.tar_paths[shard], dataset.digests[shard].hex()
    require(
        all(each is None or bool(torch.isfinite(each).all()) for each in features),
        f"{tar_path}: features of {kind.model!r} in {kind.encoder_dtype} are not finite in "
        f"{kind.stored_dtype}; choose another [encoder] cache_dtype or dtype",
    )
    path = feature_path(tar_path, kind.folder_name)
    try:
        write_feature_file(path, kind, digest, tokens, features, encoder.width)
    except OSError as error:
        raise InputError(
            f"{path}: text features cannot be written ({error.strerror or error}); free space "
            f"or fix that, and start again; complete files are kept"
        ) from error


def _token_ids(dataset: Dataset, samples: range, tokenizer: SubwordTokenizer) -> list[list[int]]:
    """Token ids of each sample's text."""
    found: list[list[int]] = []
    for first in range(samples.start, samples.stop, _TEXTS_AT_ONCE):
        chunk = range(first, min(first + _TEXTS_AT_ONCE, samples.stop))
        for sample, text in zip(chunk, read_texts(dataset, chunk)[0], strict=True):
            if text is None:
                text = dataset.metadata(sample)["text"]  # raises what is wrong with it
            try:
                found.append(tokenizer.text_ids(text))
            except InputError as error:
                raise InputError(f"sample '{dataset.sample_id(sample)}': {error}") from error
    return found
