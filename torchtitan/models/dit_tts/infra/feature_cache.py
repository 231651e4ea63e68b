"""All ranks together see to it that the text features of a run's data are there.

What is missing is shared out over the ranks that miss it: over all of them where they read one copy of
the data, over a machine's where each has its own disk. The encoder is in memory only meanwhile.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.collectives import patient_group, run_on_all_ranks
from torchtitan.models.dit_tts.infra.text_encoder import fetch_together
from torchtitan.models.dit_tts.text.encode_features import (
    feature_kind,
    longest_text,
    make_text_features,
)
from torchtitan.models.dit_tts.text.feature_builder import (
    SETTLE_SECONDS,
    TextFeatures,
    find_feature_files,
    missing_shards,
    open_text_features,
    say_missing,
)
from torchtitan.models.dit_tts.text.feature_store import FeatureKind
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, find_source
from torchtitan.models.dit_tts.text.text_encoder import (
    PretrainedTextEncoder,
    load_text_encoder,
)
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type

if TYPE_CHECKING:  # runs with the learned encoder need no tokenizers
    from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer


def ready_text_features(
    dataset: Dataset, tokenizer: "SubwordTokenizer", job_config: JobConfig
) -> TextFeatures:
    """The features of a run's data, made first where they are missing.

    Called by every rank of a job, or by a process without any.

    Raises:
        InputError: on every rank, where one cannot make or read its files.
    """
    encoder = job_config.encoder
    source = find_source(encoder.model, folder=Path(job_config.job.dump_folder))
    with patient_group() as group:
        # One rank reads the weights' files for the fingerprint, which can be many gigabytes.
        [kind, *_] = run_on_all_ranks(
            lambda rank: feature_kind(encoder, tokenizer, source) if rank == 0 else None,
            "find the text encoder",
            group,
        )
        maker = _Maker(dataset, tokenizer, job_config, source, kind)
        missing = run_on_all_ranks(lambda rank: maker.look(), "look for text features", group)
        if any(missing):
            _make_all(maker, missing, group)
            maker.let_go()
    features = open_text_features(dataset, maker.kind)
    if features.width != source.width:
        raise InputError(
            f"[encoder] model = {encoder.model!r}: its config.json says that features are "
            f"{source.width} wide, and the stored ones are {features.width}; restore the config.json "
            f"of the encoder that made them"
        )
    max_tokens = job_config.data.max_text_tokens
    _check_all_encoded(dataset, features.tokens, longest_text(source), max_tokens)
    return features


def share_out(missing: Sequence[Sequence[int]]) -> list[list[int]]:
    """The shards that each rank makes of those that each rank misses: every one is made once, by a
    rank that misses it, and about as many by each."""
    lacking = [set(shards) for shards in missing]
    shares: list[list[int]] = [[] for _ in missing]
    for shard in sorted(set().union(*lacking)):
        makers = [share for share, lacks in zip(shares, lacking, strict=True) if shard in lacks]
        min(makers, key=len).append(shard)
    return shares


class _Maker:
    """This rank's part of the work, with the encoder from its first use on."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: "SubwordTokenizer",
        job_config: JobConfig,
        source: HFEncoderSpec,
        kind: FeatureKind,
    ):
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.config = job_config
        self.source = source
        self.kind = kind
        self._encoder: PretrainedTextEncoder | None = None

    def make(self, shards: list[int], progress: bool) -> None:
        if shards:
            if self._encoder is None:
                self._encoder = self._load()
            make_text_features(
                self.dataset,
                shards,
                self._encoder,
                self.tokenizer,
                self.kind,
                on_error=self.config.data.on_error,
                progress=progress,
            )

    def look(self, wait_seconds: int = 0) -> list[int]:
        """The shards whose features are missing."""
        return missing_shards(find_feature_files(self.dataset, self.kind, wait_seconds))

    def look_again(self, made: list[int]) -> list[int]:
        """As `look`, when this rank has made some."""
        left = self.look(SETTLE_SECONDS)
        assert not set(left) & set(made), "files that were made are not found"
        return left

    def let_go(self) -> None:
        self._encoder = None
        device_module.empty_cache()

    def _load(self) -> PretrainedTextEncoder:
        encoder, folder = self.config.encoder, Path(self.config.job.dump_folder)
        loaded = load_text_encoder(encoder, torch.device(device_type), folder)
        found, wanted = self.source.fingerprint(encoder.dtype), self.kind.encoder_fingerprint
        if found != wanted:
            raise InputError(
                f"[encoder] model = {self.kind.model!r}: its weights on this machine (fingerprint "
                f"{found}) are others than rank 0's ({wanted}); give all machines the same"
            )
        return loaded


def _make_all(maker: _Maker, missing: list[list[int]], group: dist.ProcessGroup | None) -> None:
    """Makes all that is missing anywhere; the maker's kind has the encoder's fingerprint then."""
    model = maker.kind.model
    if maker.kind.encoder_fingerprint is None:
        try:
            fingerprint = fetch_together(maker.source, maker.kind.encoder_dtype)
        except InputError as error:
            lacking = say_missing(maker.dataset, maker.kind, max(missing, key=len))
            raise InputError(f"{lacking}, and cannot be made here: {error}") from error
        maker.kind = replace(maker.kind, encoder_fingerprint=fingerprint)
        # Now that the encoder is known, files of another state of it are found to be wrong.
        missing = run_on_all_ranks(lambda rank: maker.look(), "look for text features", group)
    while any(missing):
        shares = share_out(missing)
        logger.info(
            f"text features: {model} encodes the texts of {sum(map(len, shares))} of "
            f"{len(maker.dataset.tar_paths)} shards"
        )
        run_on_all_ranks(
            lambda rank: maker.make(shares[rank], rank == 0), "make text features", group
        )
        # Where each machine has its own disk, what others made is still to be made here.
        missing = run_on_all_ranks(
            lambda rank: maker.look_again(shares[rank]), "look for text features", group
        )


def _check_all_encoded(
    dataset: Dataset, tokens: np.ndarray, longest: int, max_text_tokens: int
) -> None:
    """Raises InputError where training would take a text that was too long to be encoded."""
    left_out = np.flatnonzero((tokens > longest) & (tokens <= max_text_tokens))
    if len(left_out):
        raise InputError(
            f"[data] max_text_tokens = {max_text_tokens}, but texts of more than {longest} tokens have "
            f"no stored features, as sample '{dataset.sample_id(int(left_out[0]))}'; lower it to "
            f"{longest}, or set [encoder] cache_features = false"
        )
