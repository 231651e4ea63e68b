"""Runs one training process from a config: checks, trains, and leaves a state that tools can read."""

import gc
import logging
import os
import signal
import sys

from torchtitan.models.dit_tts.errors import (
    failure_state,
    quiet_known_warnings,
    report_input_errors,
    show,
)
from torchtitan.models.dit_tts.files import keep_compiled_kernels
from torchtitan.models.dit_tts.run.launcher import (
    RANK_VARIABLES,
    check_launcher,
    die_with_parent,
)

_QUIET_FILES = (
    "torchtitan/train.py",
    "torchtitan/components/metrics.py",
    "torchtitan/distributed/parallel_dims.py",
    "torchtitan/distributed/utils.py",
    "torchtitan/tools/utils.py",
)
"""Files of upstream whose messages below a warning are about language models, or say what ours say"""

_QUIET = ("precision training with TP", "Checkpointing active", "purge thread", "ENV[TORCH_NCCL")


def concerns_this_run(record: logging.LogRecord) -> bool:
    quiet = record.levelno < logging.WARNING and record.pathname.endswith(_QUIET_FILES)
    return not quiet and not any(part in record.getMessage() for part in _QUIET)


def set_single_process_defaults() -> None:
    """Lets `python train.py` run without torchrun, as the only process of its group."""
    if "RANK" not in os.environ:
        # Port 0: the store takes a free one itself. One that is looked for before may be taken meanwhile.
        os.environ.update(zip(RANK_VARIABLES, ("0", "0", "1", "127.0.0.1", "0"), strict=True))
    check_launcher()


@report_input_errors
def train(args: list[str]) -> int:
    """Trains as the command line says. Returns the exit status."""
    if not {"-h", "--help"}.isdisjoint(args):
        from torchtitan.models.dit_tts.config.help import print_help

        return print_help()
    # Before what takes seconds to import: most mistakes are in the config.
    from torchtitan.models.dit_tts.config.manager import load_config, run_folder_path

    config = load_config(args)
    if "RANK" not in os.environ:
        show(f"titan-tts train: starting; run folder: {run_folder_path(config)}")
    set_single_process_defaults()
    keep_compiled_kernels()

    # Modules are no garbage, and looking for it takes a fifth of a start. Upstream's trainer disables
    # the collector, too, and collects every [training] gc_freq steps.
    gc.disable()
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    from torchtitan.models.dit_tts.config.checks import validate_config, validate_machine
    from torchtitan.models.dit_tts.infra.stop_signal import StopSignal, state_after
    from torchtitan.models.dit_tts.model_config import model_flavors
    from torchtitan.models.dit_tts.run.run_folder import RunFolder
    from torchtitan.models.dit_tts.run.teacher import with_teacher
    from torchtitan.models.dit_tts.run.trackers import check_trackers
    from torchtitan.models.dit_tts.speech.codec.record import check_kind
    from torchtitan.models.dit_tts.speech.scoring.plugins import check_pretrained
    from torchtitan.models.dit_tts.trainer import DiTTTSTrainer
    from torchtitan.tools.logging import init_logger, logger

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = with_teacher(config)
    validate_config(config, world_size, list(model_flavors()))
    validate_machine(config)
    check_kind(config.sampling.codec, config.data.path)
    if rank == 0:
        check_trackers(config)
        if config.samples.freq:
            check_pretrained(config.samples)
    init_logger()
    logger.addFilter(concerns_this_run)
    quiet_known_warnings()
    if rank != 0:
        logger.setLevel("WARNING")  # the ranks' logs are alike; rank 0's is enough
    folder = RunFolder(run_folder_path(config), rank)
    trainer = failure = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    stop_signal = StopSignal(lambda number: folder.set_state(state_after(number), folder.step))
    gc.freeze()
    try:
        folder.start(config)
        trainer = DiTTTSTrainer(config, folder, stop_signal)
        if config.checkpoint.create_seed_checkpoint:
            folder.confirm(trainer.config)
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
            if trainer.benchmark is not None and not trainer.stopped_by:
                trainer.benchmark.finish(folder.path)
        stopped_by = trainer.stopped_by
        folder.set_state(state_after(stopped_by) if stopped_by else "completed", trainer.step)
    except (Exception, KeyboardInterrupt, CheckpointException) as error:
        if trainer and failure_state(error) == "timeout" and (behind := trainer.progress.behind()):
            error.add_note(behind)
        failure = error
        folder.fail(error)
        raise
    finally:
        try:
            if trainer is not None:
                trainer.close()
        finally:
            if failure is not None:
                # A save in the background has ended by now: it counts, or its space is free again.
                folder.fail(failure)
            stop_signal.close()
            folder.close()
            gc.unfreeze()
    if stopped_by:
        if rank == 0:
            print(
                f"{signal.Signals(stopped_by).name}: the run has ended after step {trainer.step}; the same "
                f"command continues from its last checkpoint",
                file=sys.stderr,
            )
        if world_size > 1:
            torch.distributed.barrier()  # a launcher ends the others as soon as one has ended
        return 128 + stopped_by
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0
