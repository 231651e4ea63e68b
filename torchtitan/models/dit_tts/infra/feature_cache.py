"""All ranks together see to it that the text features of a run's data are there.

What is missing is shared out over the ranks that miss it: over all of them where they read one copy of
the data, over a machine's where each has its own disk. The encoder is in memory only meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.conditioning.encode_features import (
    feature_kind,
    longest_text,
    make_text_features,
)
from torchtitan.models.dit_tts.conditioning.encoder_source import find_source
from torchtitan.models.dit_tts.conditioning.feature_file import FeatureKind
from torchtitan.models.dit_tts.conditioning.text_encoder import (
    PretrainedTextEncoder,
    load_text_encoder,
)
from torchtitan.models.dit_tts.conditioning.text_features import (
    TextFeatures,
    find_feature_files,
    open_text_features,
)
from torchtitan.models.dit_tts.data.archive import Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.together import patient_group, together
from torchtitan.models.dit_tts.job_config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type

if TYPE_CHECKING:  # runs with the learned encoder need no tokenizers
    from torchtitan.models.dit_tts.conditioning.subword_tokenizer import SubwordTokenizer

SETTLE_SECONDS = 60
"""after which a network file system shows every machine what others wrote"""


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
    # One rank reads the weights' files for the fingerprint, which can be many gigabytes.
    kinds = together(
        lambda rank: feature_kind(encoder, tokenizer, source) if rank == 0 else None,
        "find the text encoder",
    )
    kind = kinds[0]
    missing = together(lambda rank: _missing(dataset, kind), "look for text features")
    if any(missing):
        with patient_group() as group:
            maker = _Maker(dataset, tokenizer, job_config, kind)
            kind = _make_all(maker, missing, group)
            del maker
        device_module.empty_cache()
    features = open_text_features(dataset, kind)
    most_tokens = job_config.data.max_text_tokens
    _check_all_encoded(dataset, features.tokens, longest_text(source), most_tokens)
    return features


def _missing(dataset: Dataset, kind: FeatureKind) -> list[int]:
    return [shard for shard, file in enumerate(find_feature_files(dataset, kind)) if file is None]


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
        kind: FeatureKind,
    ):
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.config = job_config
        self.kind = kind
        self._encoder: PretrainedTextEncoder | None = None

    def fingerprint(self) -> str:
        """Of the encoder, which may have to be downloaded first."""
        self._load()
        return self._encoder.source.fingerprint(self.config.encoder.dtype)

    def make(self, shards: list[int], progress: bool) -> None:
        if shards:
            self._load()
            make_text_features(
                self.dataset, shards, self._encoder, self.tokenizer, self.kind,
                on_error=self.config.data.on_error, progress=progress,
            )  # fmt: skip

    def look(self, made: list[int]) -> list[int]:
        """The shards whose features are missing still; not those that this rank made."""
        waited = 0
        while (left := _missing(self.dataset, self.kind)) and waited < SETTLE_SECONDS:
            time.sleep(1)
            waited += 1
        assert not set(left) & set(made), "files that were made are not found"
        return left

    def _load(self) -> None:
        if self._encoder is not None:
            return
        self._encoder = load_text_encoder(self.config.encoder, torch.device(device_type))
        wanted = self.kind.encoder_fingerprint
        if wanted is not None and (found := self.fingerprint()) != wanted:
            raise InputError(
                f"[encoder] model = {self.kind.model!r}: its weights on this machine (fingerprint "
                f"{found}) are others than rank 0's ({wanted}); give all machines the same"
            )


def _make_all(
    maker: _Maker, missing: list[list[int]], group: dist.ProcessGroup | None
) -> FeatureKind:
    """Makes all that is missing anywhere; the kind, with the encoder's fingerprint."""
    model = maker.kind.model
    if maker.kind.encoder_fingerprint is None:
        found = together(
            lambda rank: maker.fingerprint() if missing[rank] else None, f"load {model}", group
        )
        maker.kind = replace(maker.kind, encoder_fingerprint=next(filter(None, found)))
        # Now that the encoder is known, files of another state of it are found to be wrong.
        missing = together(
            lambda rank: _missing(maker.dataset, maker.kind), "look for text features", group
        )
    while any(missing):
        shares = share_out(missing)
        logger.info(
            f"text features: {model} encodes the texts of {sum(map(len, shares))} of "
            f"{len(maker.dataset.tar_paths)} shards"
        )
        together(lambda rank: maker.make(shares[rank], rank == 0), "make text features", group)
        # Where each machine has its own disk, what others made is still to be made here.
        missing = together(lambda rank: maker.look(shares[rank]), "look for text features", group)
    return maker.kind


def _check_all_encoded(
    dataset: Dataset, tokens: np.ndarray, longest: int, max_text_tokens: int
) -> None:
    """Raises InputError where training would take a text that was too long to be encoded."""
    left_out = np.flatnonzero((tokens > longest) & (tokens <= max_text_tokens))
    if len(left_out):
        raise InputError(
            f"[data] max_text_tokens = {max_text_tokens}, but texts of more than {longest} tokens have "
            f"no stored features, as sample '{dataset.sample_id(int(left_out[0]))}'; lower it to "
            f"{longest}, or set [encoder] cache = false"
        )
