"""Makes the text features that a run's data lacks, on all ranks together.

The missing shards are split over the ranks that miss them: over all ranks where they read one copy of
the data, over those of a machine where each has its own disk. The encoder is in memory only meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.collectives import patient_group, run_on_all_ranks
from torchtitan.models.dit_tts.infra.text_encoder import fetch_together
from torchtitan.models.dit_tts.text.feature_builder import (
    feature_kind,
    longest_text,
    make_text_features,
)
from torchtitan.models.dit_tts.text.feature_store import (
    SETTLE_SECONDS,
    FeatureKind,
    TextFeatures,
    describe_missing,
    find_feature_files,
    missing_shards,
    open_text_features,
    with_stored_fingerprint,
)
from torchtitan.models.dit_tts.text.hf_encoder import HFEncoderSpec, find_source
from torchtitan.models.dit_tts.text.hf_tokenizer import SubwordTokenizer
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type


def ready_text_features(
    dataset: Dataset, tokenizer: SubwordTokenizer, job_config: JobConfig
) -> TextFeatures:
    """The features of a run's data, made first where they are missing.

    Called by every rank of a job, or by a process without any.

    Raises:
        InputError: on every rank, where one cannot make or read its files.
    """
    encoder = job_config.encoder
    source = find_source(encoder.model, folder=Path(job_config.job.dump_folder))

    def find_kinds(rank: int) -> tuple[FeatureKind, FeatureKind] | None:
        if rank != 0:  # the fingerprint needs a pass over the weights, which can be many gigabytes
            return None
        kind = feature_kind(encoder, tokenizer, source)
        return kind, with_stored_fingerprint(dataset, kind)

    with patient_group() as group:
        kinds = run_on_all_ranks(find_kinds, "find the text encoder", group)[0]
        assert kinds is not None
        of_weights, kind = kinds
        maker = _Maker(dataset, kind, tokenizer, job_config, source)
        missing = maker.look_on_all_ranks(group)
        if any(missing) and of_weights.encoder_fingerprint is None:
            try:
                fingerprint = fetch_together(source, encoder.dtype)
            except InputError as error:
                lacking = describe_missing(dataset, kind, max(missing, key=len))
                raise InputError(f"{lacking}, and cannot be made here: {error}") from error
            maker.kind = replace(kind, encoder_fingerprint=fingerprint)
            missing = maker.look_on_all_ranks(group)
        make_all(maker, missing, group)
    features = open_text_features(dataset, maker.kind)
    max_tokens = job_config.data.max_text_tokens
    _check_all_encoded(dataset, features.tokens, longest_text(source), max_tokens)
    return features


def split_missing(missing: Sequence[Sequence[int]]) -> list[list[int]]:
    """The shards that each rank makes.

    Args:
        missing: the shards that each rank misses. Each is made once, by a rank that misses it, and
            the ranks make about as many each.
    """
    lacking = [set(shards) for shards in missing]
    parts: list[list[int]] = [[] for _ in missing]
    for shard in sorted(set().union(*lacking)):
        makers = [part for part, lacks in zip(parts, lacking, strict=True) if shard in lacks]
        min(makers, key=len).append(shard)
    return parts


@dataclass
class FeatureMaker:
    """This rank's part of the work."""

    dataset: Dataset
    kind: FeatureKind

    def make(self, shards: list[int], progress: bool) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Gives up what only making needs."""

    def look_on_all_ranks(
        self, group: dist.ProcessGroup | None, wait_seconds: int = 0
    ) -> list[list[int]]:
        """The shards whose features each rank misses."""
        return run_on_all_ranks(
            lambda rank: missing_shards(find_feature_files(self.dataset, self.kind, wait_seconds)),
            "look for text features",
            group,
        )


@dataclass
class _Maker(FeatureMaker):
    """With the encoder from its first use on."""

    tokenizer: SubwordTokenizer
    config: JobConfig
    source: HFEncoderSpec
    encoder: PretrainedTextEncoder | None = None

    def release(self) -> None:
        self.encoder = None

    def make(self, shards: list[int], progress: bool) -> None:
        if not shards:
            return
        self.encoder = self.encoder or self._load()
        make_text_features(
            self.dataset,
            shards,
            self.encoder,
            self.tokenizer,
            self.kind,
            on_error=self.config.data.on_error,
            progress=progress,
        )

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


def make_all(
    maker: FeatureMaker, missing: list[list[int]], group: dist.ProcessGroup | None
) -> None:
    """Makes all that is missing on any rank, and gives up what only that needs, with its memory."""
    while any(missing):
        parts = split_missing(missing)
        logger.info(
            f"text features: {maker.kind.model} encodes {sum(map(len, parts))} "
            f"of {len(maker.dataset.tar_paths)} shards"
        )
        run_on_all_ranks(lambda rank: maker.make(parts[rank], rank == 0), "make features", group)
        # Where each machine has its own disk, what others made is still to be made here.
        missing = maker.look_on_all_ranks(group, SETTLE_SECONDS)
        for part, left in zip(parts, missing, strict=True):
            assert not set(left) & set(part), "files that were made are not found"
    maker.release()
    device_module.empty_cache()


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
