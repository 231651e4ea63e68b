"""`titan-tts prepare --encode-text`: a text encoder's features beside the shards of an output."""

import json
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_tts.jobs.devices import codec_devices
from titan_tts.jobs.engines import open_engine
from titan_tts.jobs.run import Job, progress, run_jobs
from titan_tts.prepare.work_folder import working_in_partial
from torchtitan.models.dit_tts.config.job_config import Encoder, is_pretrained
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset
from torchtitan.models.dit_tts.data.index import load_index
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.text.feature_store import (
    FOLDER_NAME,
    FeatureKind,
    feature_kind,
    feature_path,
    find_feature_files,
    longest_text,
    with_stored_fingerprint,
    write_feature_file,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer, load_subword_tokenizer
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder
from torchtitan.models.dit_tts.text.token_counts import read_texts


def check_encoder(encoder: Encoder) -> None:
    """Raises InputError where texts cannot be encoded so."""
    if not is_pretrained(encoder.model):
        raise InputError(
            f"--encode-text {encoder.model}: the learned encoder is trained with the model and has no "
            f"features to store; give a hub name or a folder, or leave the option out"
        )
    load_subword_tokenizer(encoder.model)


def encode_texts(
    output: Path, shard_names: list[str], encoder: Encoder, device: str, engine: str
) -> tuple[int, int]:
    """Makes the feature files that an output's shards lack, with a process for each device. Returns the number of
    texts in all shards, and of those encoded now.
    """
    # A worker may be a process of another machine, in another folder.
    tar_paths = [str(output.resolve() / name) for name in shard_names]
    dataset = open_dataset(tar_paths, load_index(tar_paths[0]).channels)
    source, tokenizer = find_source(encoder.model), load_subword_tokenizer(encoder.model)
    kind = with_stored_fingerprint(dataset, feature_kind(encoder, tokenizer, source))
    files = find_feature_files(dataset, kind)
    here = sum(len(file.tokens) for file in files if file is not None)
    settings = json.dumps(asdict(replace(encoder, model=source.model)))
    found = zip(tar_paths, files, strict=True)
    jobs = [Job(path, (path, settings)) for path, file in found if file is None]
    devices = codec_devices(device, engine)
    if jobs:
        with (
            working_in_partial(output.resolve()),
            open_engine(engine, len(devices), devices) as runner,
            progress("encoding texts", "shard", jobs) as bar,
        ):
            for left in output.glob(f"*/{FOLDER_NAME}/*/.*.tmp"):  # by killed writers
                left.unlink()
            for _ in run_jobs(
                runner, "titan_tts.prepare.encode_text:encode_shard", jobs, bar, output
            ):
                pass
    return len(dataset), len(dataset) - here


def encode_shard(tar_path: str, settings: str, device: str) -> dict[str, Any]:
    """Makes one shard's feature file by an `Encoder` of these settings, in JSON. Called by name in processes of every
    engine."""
    encoder, tokenizer, kind = _loaded(settings, device)
    dataset = open_dataset(tar_path, load_index(tar_path).channels)
    make_shard_features(dataset, 0, encoder, tokenizer, kind)
    return {}


def make_shard_features(
    dataset: Dataset,
    shard: int,
    encoder: PretrainedTextEncoder,
    tokenizer: SubwordTokenizer,
    kind: FeatureKind,
) -> None:
    """Encodes the texts of a shard of this number. `kind`: with the encoder's fingerprint."""
    first, end = np.searchsorted(dataset.shard, [shard, shard + 1]).tolist()
    texts: list[list[int]] = []
    for sample, text in enumerate(read_texts(dataset, range(first, end))[0], first):
        if text is None:
            text = dataset.metadata(sample)["text"]  # raises what is wrong with it
        try:
            texts.append(tokenizer.text_ids(text))
        except InputError as error:
            raise InputError(f"sample '{dataset.sample_id(sample)}': {error}") from error
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
    write_feature_file(path, kind, digest, tokens, features, encoder.width)


@lru_cache(maxsize=1)
def _loaded(
    settings: str, device: str
) -> tuple[PretrainedTextEncoder, SubwordTokenizer, FeatureKind]:
    """A process's encoder, loaded once for all its shards."""
    config = Encoder(**json.loads(settings))
    encoder = load_text_encoder(config, device)
    tokenizer = load_subword_tokenizer(config.model)
    return encoder, tokenizer, feature_kind(config, tokenizer, encoder.source)
