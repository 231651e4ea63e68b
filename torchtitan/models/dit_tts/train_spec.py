"""The functions that upstream's trainer builds a run from."""

from typing import Any

from torchtitan.models.dit_tts.benchmark.loader import (
    build_synthetic_dataloader,
    build_synthetic_tokenizer,
)
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.flow.objective import build_flow_loss
from torchtitan.models.dit_tts.infra.agreement import build_agreed_dataloader
from torchtitan.models.dit_tts.infra.optimizer import (
    build_tts_lr_schedulers,
    build_tts_optimizers,
)
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts
from torchtitan.models.dit_tts.metrics import build_tts_metrics_processor
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.text.build_tokenizer import build_tokenizer
from torchtitan.protocols.train_spec import BaseTokenizer, TrainSpec


def _build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    build = build_synthetic_tokenizer if job_config.benchmark.enable else build_tokenizer
    return build(job_config)


def _build_dataloader(*, job_config: JobConfig, **kwargs: Any) -> LatentDataLoader:
    synthetic = job_config.benchmark.enable
    build = build_synthetic_dataloader if synthetic else build_agreed_dataloader
    return build(job_config=job_config, **kwargs)


def get_train_spec() -> TrainSpec:
    return TrainSpec(
        model_cls=DiTTTSModel,
        model_args=model_flavors(),
        parallelize_fn=parallelize_dit_tts,
        pipelining_fn=None,
        build_optimizers_fn=build_tts_optimizers,
        build_lr_schedulers_fn=build_tts_lr_schedulers,  # type: ignore[arg-type]
        build_dataloader_fn=_build_dataloader,
        build_tokenizer_fn=_build_tokenizer,
        build_loss_fn=build_flow_loss,
        build_metrics_processor_fn=build_tts_metrics_processor,
    )
