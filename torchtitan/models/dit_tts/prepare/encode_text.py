"""`titan-tts prepare --encode-text`: a text encoder's features beside the archives of a finished output."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config.job_config import Encoder, is_pretrained
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.executors import codec_devices, open_engine
from torchtitan.models.dit_tts.text.encode_features import (
    feature_kind,
    longest_text,
    make_text_features,
)
from torchtitan.models.dit_tts.text.feature_builder import (
    SETTLE_SECONDS,
    find_feature_files,
    missing_shards,
    say_missing,
)
from torchtitan.models.dit_tts.text.feature_store import FeatureKind
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.hf_tokenizer import (
    SubwordTokenizer,
    load_subword_tokenizer,
)
from torchtitan.models.dit_tts.text.text_encoder import (
    PretrainedTextEncoder,
    load_text_encoder,
)


def check_encoder(encoder: Encoder) -> None:
    """Raises InputError where texts cannot be encoded so, before recordings are."""
    if not is_pretrained(encoder.model):
        raise InputError(
            f"--encode-text {encoder.model}: the learned encoder is trained with the model and has no "
            f"features to store; give a hub name or a folder, or leave the option out"
        )
    load_subword_tokenizer(encoder.model)


def encode_texts(
    output: Path, shard_names: list[str], encoder: Encoder, device: str, engine: str
) -> dict[str, int]:
    """Makes the feature files that an output's shards lack.

    Args:
        shard_names: paths of the shards in the output.
        device, engine: as of the preparation; each device gets a process.

    Returns:
        {"texts": of all shards, "made": of those that were encoded now, "too_long": texts that have no
        features, "longest": tokens of the longest that can have}.

    Raises:
        InputError: nothing can be loaded or written, or a worker's encoder or disk is another than
            this process's. Whole files are kept.
    """
    from tqdm import tqdm

    # A worker may be a process of another machine, in another folder.
    tar_paths = [str(output.resolve() / name) for name in shard_names]
    dataset = open_dataset(tar_paths, load_index(tar_paths[0]).channels)
    source, tokenizer = find_source(encoder.model), load_subword_tokenizer(encoder.model)
    files = find_feature_files(dataset, feature_kind(encoder, tokenizer, source))
    missing = missing_shards(files)
    here = sum(len(file.tokens) for file in files if file is not None)
    jobs = [
        (tar_paths[shard], source.model, encoder.dtype, encoder.cache_dtype) for shard in missing
    ]
    devices = codec_devices(device, engine)
    if jobs:
        with (
            open_engine(engine, len(devices), devices) as runner,
            tqdm(desc="encoding texts", total=len(dataset), initial=here, unit="text") as progress,
        ):
            for result in runner("encode_text:encode_shard", jobs):
                if "error" in result:
                    raise InputError(result["error"])
                progress.update(result["texts"])
        # Now with the fingerprint, where the weights were downloaded meanwhile: those of another
        # encoder are refused.
        kind = feature_kind(encoder, tokenizer, source)
        files = find_feature_files(dataset, kind, SETTLE_SECONDS)
        if None in files:
            raise InputError(
                f"{say_missing(dataset, kind, missing_shards(files))}, though they were made: the "
                f"workers do not write where this process reads; give every machine {output} under "
                f"this path, and the right to write there"
            )
    return {
        "texts": len(dataset),
        "made": len(dataset) - here,
        "too_long": sum(int(np.count_nonzero((f.hashes == 0) & (f.tokens > 0))) for f in files),
        "longest": longest_text(source),
    }


def encode_shard(
    tar_path: str, model: str, dtype: str, cache_dtype: str, device: str
) -> dict[str, Any]:
    """Makes one shard's feature file.

    Called by name in processes of every engine.

    Returns:
        {"texts": number}; or {"error": sentence}.
    """
    try:
        encoder, tokenizer, kind = _loaded(model, dtype, cache_dtype, device)
        dataset = open_dataset(tar_path, load_index(tar_path).channels)
        make_text_features(dataset, [0], encoder, tokenizer, kind, progress=False)
    except InputError as error:
        return {"error": str(error)}
    return {"texts": len(dataset)}


@lru_cache(maxsize=1)
def _loaded(
    model: str, dtype: str, cache_dtype: str, device: str
) -> tuple[PretrainedTextEncoder, SubwordTokenizer, FeatureKind]:
    """A process's encoder, loaded once for all its shards."""
    config = Encoder(model=model, dtype=dtype, cache_dtype=cache_dtype)
    encoder = load_text_encoder(config, device)
    tokenizer = load_subword_tokenizer(model)
    return encoder, tokenizer, feature_kind(config, tokenizer, encoder.source)
