"""Builds a run's validator from its config, or says why there is none."""

from dataclasses import replace
from typing import cast

import numpy as np

from torchtitan.distributed import ParallelDims
from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.data.heldout import FEW_SAMPLES
from torchtitan.models.dit_tts.flow.duration import duration_figures
from torchtitan.models.dit_tts.flow.objective import build_flow_loss, build_objective
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.infra.collectives import assert_equal_across_ranks
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.infra.parallelize import is_first_copy
from torchtitan.models.dit_tts.infra.stop_signal import StopSignal
from torchtitan.models.dit_tts.metrics import TTSMetricsProcessor
from torchtitan.models.dit_tts.run.checkpointing import RunCheckpointer
from torchtitan.models.dit_tts.run.run_folder import RunFolder
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.record import check_codec, check_same_codec
from torchtitan.models.dit_tts.text.durations import stored_durations
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer
from torchtitan.models.dit_tts.validation.fixed_batches import FixedSet
from torchtitan.models.dit_tts.validation.heldout_loss import HeldoutLoss
from torchtitan.models.dit_tts.validation.speech_samples import SpeechSamples, choose_prompts
from torchtitan.models.dit_tts.validation.validator import Validator
from torchtitan.tools.logging import logger


def build_validator(
    config: JobConfig,
    view: JobConfig,
    forward_pass: ForwardPass,
    ema: EMA | None,
    dataloader: LatentDataLoader,
    parallel_dims: ParallelDims,
    run_folder: RunFolder,
    metrics: TTSMetricsProcessor,
    checkpointer: RunCheckpointer,
    stop_signal: StopSignal,
) -> Validator | None:
    """The validator of a run; None where it is off or there are no held-out samples. `view`: the
    same as upstream sees it.
    """
    validation = config.validation
    assert_equal_across_ranks({"validation": validation.enable})
    if not validation.enable:
        if run_folder.rank == 0 and not config.benchmark.enable:
            logger.warning(
                "No validation: [validation] is off, or there are no held-out samples next to [data] path; "
                "hold some out with titan-tts prepare --heldout-fraction 0.02, or give [validation] path"
            )
        return None
    objective, is_duration = build_objective(config), config.model.flavor == DURATION_FLAVOR
    tokenizer = cast(ConditionedTokenizer, dataloader.tokenizer)
    mesh = parallel_dims.get_optional_mesh("batch")
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    group = mesh.get_group() if mesh is not None else None
    data = replace(config.data, path=validation.path)
    check_same_codec(validation.path, config.data.path)
    heldout = open_training_data(data, (rank, ranks))
    assert_equal_across_ranks({"held-out data": heldout.fingerprint})
    limits = validation.samples, validation.batch_size, config.objective.loss_on_padding
    held_out, trained = (
        FixedSet(each, data, tokenizer, *limits) for each in (heldout, dataloader.dataset)
    )
    loss = HeldoutLoss(
        held_out,
        trained,
        validation,
        objective,
        forward_pass,
        rank,
        ranks,
        group,
        build_flow_loss(config),
        duration_figures(data.frames_per_second) if is_duration else {},
        stop_signal.until_stopped,
    )
    logger.info(
        f"Validation every {validation.freq} steps on {len(held_out)} held-out samples of "
        f"{validation.path} and {len(trained)} training samples"
    )
    first = run_folder.rank == 0  # of the ranks, whose warnings would be alike
    if first and len(held_out) < min(FEW_SAMPLES, validation.samples):
        logger.warning(
            f"Only {len(held_out)} held-out samples: their loss is a noisy measure, and the step kept as best "
            f"may not be the best; of more recordings, hold out at least {FEW_SAMPLES}"
        )
    trained = np.isin(heldout.latents_hash, dataloader.dataset.latents_hash).sum()
    if first and trained:
        logger.warning(
            f"{trained} of the {len(heldout)} held-out samples are also training samples, so their loss "
            "measures memorization; titan-tts data doctor TRAIN HELDOUT lists them"
        )
    samples = None
    if config.samples.freq:
        codec = build_codec(config.sampling.codec, str(forward_pass.device))
        check_codec(codec, config.data.path)
        durations = stored_durations(run_folder.path)
        samples = SpeechSamples(
            config,
            run_folder.path / "samples",
            choose_prompts(heldout, held_out.fitting, config.samples.count, durations, config),
            codec,
            tokenizer,
            objective,
            forward_pass,
            rank,
            ranks,
            sharded=parallel_dims.fsdp_enabled or parallel_dims.dp_replicate_enabled,
            reports=is_first_copy(parallel_dims),
            writes=run_folder.rank == 0,
            until_stopped=stop_signal.until_stopped,
        )
    return Validator(
        config,
        forward_pass.model,
        ema,
        loss,
        samples,
        run_folder,
        metrics,
        checkpointer.keep,
        checkpointer.maybe_wait_for_staging,
    )
