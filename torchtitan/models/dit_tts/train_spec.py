"""The functions that upstream's trainer builds a run from."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.job_config import FLOAT8_CONVERTER, JobConfig
from torchtitan.models.dit_tts.data.build import build_dataloader, training_samples
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.data.dataset import Dataset, open_training_data
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.flow.objective import build_flow_loss
from torchtitan.models.dit_tts.infra.adapters import add_adapter
from torchtitan.models.dit_tts.infra.collectives import (
    assert_equal_across_ranks,
    long_timeout_group,
    run_on_all_ranks,
)
from torchtitan.models.dit_tts.infra.float8 import Float8Converter
from torchtitan.models.dit_tts.infra.kernels import build_model
from torchtitan.models.dit_tts.infra.optimizer import build_tts_lr_schedulers, build_tts_optimizers
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.run.benchmark.loader import (
    build_synthetic_dataloader,
    build_synthetic_tokenizer,
)
from torchtitan.models.dit_tts.text.aligner import Aligner, choose_recordings, fit_aligner
from torchtitan.models.dit_tts.text.build_tokenizer import build_tokenizer, origin_of_weights
from torchtitan.models.dit_tts.text.durations import (
    DURATIONS_FILE,
    fit_durations,
    language_unlike_phones,
    read_evenly,
    stored_durations,
)
from torchtitan.models.dit_tts.text.matching import (
    LITTLE_EXPLAINED,
    OF_OTHERS,
    Match,
    judge_texts,
)
from torchtitan.models.dit_tts.text.phones import Phonemizer, check_letters
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer
from torchtitan.models.dit_tts.text.vocabulary import language_of
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import BaseTokenizer, TrainSpec
from torchtitan.tools.logging import logger

register_model_converter(Float8Converter, FLOAT8_CONVERTER)


def _build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    if job_config.benchmark.enable:
        return build_synthetic_tokenizer(job_config)
    _ready_durations(job_config)
    return build_tokenizer(job_config, partial(_new_aligner, job_config))


def _ready_durations(job_config: JobConfig) -> None:
    """Fits lengths where the run has no weights yet. Rank 0 does, as the texts behind URLs need not be read by all
    ranks."""
    folder = Path(job_config.job.dump_folder)
    origin = origin_of_weights(job_config, folder)

    def fit(rank: int) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        dataset = open_training_data(job_config.data, (rank, ranks))
        if rank == 0:
            if language := language_of(job_config.encoder.model):
                added = AddedTokens(job_config.encoder.added_tokens)
                check_letters(dataset, Phonemizer(language, added))
            base = None
            if origin is not None and (origin / DURATIONS_FILE).is_file():
                base = stored_durations(origin)
            read = read_evenly(dataset)
            found = fit_durations(dataset, job_config.encoder, base, read)
            write_atomic(folder / DURATIONS_FILE, found.to_json())
            _tell_of_texts(judge_texts(*read), dataset, job_config.encoder.model)

    if origin != folder:
        with long_timeout_group() as group:
            run_on_all_ranks(fit, "read the texts of [data] path", group)


def _tell_of_texts(matches: Sequence[Match], dataset: Dataset, model: str) -> None:
    """Warns of texts that seem to belong to other recordings, or are of another language than the phones of `model`."""
    for match in matches:
        if match.verdict in (OF_OTHERS, LITTLE_EXPLAINED):
            logger.warning(f"{match.where}: {match}; titan-tts data doctor says what to look for")
        else:
            logger.info(f"{match.where}: {match}")
    if language := language_unlike_phones(dataset, model):
        logger.warning(
            f"most samples have the language {language!r}, but [encoder] model = {model!r} reads their texts by the rules "
            f"of another; give 'phones:{language}', or start from a model of that language"
        )


def _new_aligner(job_config: JobConfig, tokenizer: ConditionedTokenizer) -> Aligner:
    """Learned by rank 0 from the recordings of [data] path."""

    def fit(rank: int) -> Aligner | None:
        data = job_config.data
        if rank != 0:
            return None
        dataset = open_training_data(data)
        # Refused before minutes of work.
        training_samples(data, dataset, tokenizer.max_tokens(dataset))
        recordings = choose_recordings(dataset, data.max_frames)
        if not recordings:
            raise InputError(
                f"[model] text_positions = 'aligned', but no sample of [data] path has a text and at most "
                f"{data.max_frames} frames; prepare the data with texts, or set it to 'none'"
            )
        logger.info(f"Learning from {len(recordings)} recordings where their texts are spoken")
        return fit_aligner([(tokenizer.spoken(text), latents) for text, latents in recordings])

    with long_timeout_group() as group:
        aligner = run_on_all_ranks(fit, "align the texts of [data] path", group)[0]
    assert aligner is not None
    return aligner


def build_agreed_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: JobConfig
) -> LatentDataLoader:
    """`build_dataloader`, once all ranks have found the same order and tokens."""
    loader = build_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    parts = json.loads(loader.state_dict()["order_fingerprint"])
    parts["tokens"] = tokenizer.vocabulary.fingerprint
    parts["steps"] = job_config.training.steps
    assert_equal_across_ranks(parts)
    return loader


def _build_dataloader(*, job_config: JobConfig, **kwargs: Any) -> LatentDataLoader:
    synthetic = job_config.benchmark.enable
    build = build_synthetic_dataloader if synthetic else build_agreed_dataloader
    return build(job_config=job_config, **kwargs)


def _parallelize(
    model: DiTTTSModel, parallel_dims: ParallelDims, job_config: JobConfig
) -> DiTTTSModel:
    """Add the adapter of [lora], then parallelize the model by the [parallelism] backend."""
    add_adapter(model, job_config.lora)
    if job_config.parallelism.backend == "megatron":
        from torchtitan.models.dit_tts.infra.parallelize_megatron import parallelize_megatron

        return parallelize_megatron(model, parallel_dims, job_config)
    return parallelize_dit_tts(model, parallel_dims, job_config)


def get_train_spec() -> TrainSpec:
    return TrainSpec(
        model_cls=build_model,  # type: ignore[arg-type]
        model_args=model_flavors(),
        parallelize_fn=_parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_tts_optimizers,
        build_lr_schedulers_fn=build_tts_lr_schedulers,  # type: ignore[arg-type]
        build_dataloader_fn=_build_dataloader,
        build_tokenizer_fn=_build_tokenizer,
        build_loss_fn=build_flow_loss,
        build_metrics_processor_fn=TTSMetricsProcessor,
    )
