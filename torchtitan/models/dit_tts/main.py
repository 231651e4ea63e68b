"""Runs one training process from a config: checks, trains, and leaves a state that tools can read."""

import logging
import os
import signal
import socket
from types import FrameType

from torchtitan.models.dit_tts.errors import quiet_known_warnings, report_input_errors
from torchtitan.models.dit_tts.plan.dry_run import run_dry, take_options

_UPSTREAM_LOG = (
    "Starting job",
    "[GC] ",
    "Building dit_tts",
    "total parameters",
    "Peak FLOPS used",
    " capacity: ",
    "CPU memory usage for model",
    "handled by AMP",
    "Building device mesh",
    "Successfully created meshes",
    "adjusting timeout for all ProcessGroups",
    "Trainer is initialized",
    "Checkpointing active",
    "oading the checkpoint",
    "Training starts at step",
    "Training completed",
    "Sleeping 2 seconds",
    "purge thread",
)
"""Parts of torchtitan 0.2.2's log messages that are about language models, or say what our own say"""


def concerns_this_run(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(part in message for part in _UPSTREAM_LOG)


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM, from a scheduler or from torchrun when another rank failed, as an exception."""
    raise KeyboardInterrupt("terminated by SIGTERM")


def set_single_process_defaults() -> None:
    """Lets `python train.py` run without torchrun, as the only process of its group."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


@report_input_errors
def train(args: list[str]) -> int:
    """Trains as the command line says, or prints a plan with --dry-run. Returns the exit status.

    Raises:
        InputError: a mistake in config or data.
    """
    if not {"-h", "--help", "--help-all"}.isdisjoint(args):
        from torchtitan.models.dit_tts.config.help import print_help

        return print_help("--help-all" in args)
    dry_run = take_options(args)
    if dry_run is not None:
        return run_dry(dry_run)
    # Before what takes seconds to import: most mistakes are in the config.
    from torchtitan.models.dit_tts.config.manager import load_config, run_folder_path

    config = load_config(args)
    set_single_process_defaults()

    import torch

    from torchtitan.models.dit_tts.codec.record import check_kind
    from torchtitan.models.dit_tts.config.checks import validate_config, validate_machine
    from torchtitan.models.dit_tts.model_config import model_flavors
    from torchtitan.models.dit_tts.plan.compare import write_plan
    from torchtitan.models.dit_tts.run_folder import RunFolder, gpus_per_node
    from torchtitan.models.dit_tts.trainer import DiTTTSTrainer
    from torchtitan.tools.logging import init_logger, logger
    from torchtitan.tools.utils import device_module

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    validate_config(config, world_size, list(model_flavors()))
    validate_machine(config)
    check_kind(config.sampling.codec, config.data.path)
    init_logger()
    logger.addFilter(concerns_this_run)
    quiet_known_warnings()
    if rank != 0:
        logger.setLevel("WARNING")  # the ranks' logs are alike; rank 0's is enough
    folder = RunFolder(run_folder_path(config), rank)
    trainer = None
    try:
        folder.start(config)
        signal.signal(signal.SIGTERM, raise_terminated)
        trainer = DiTTTSTrainer(config, folder)
        if config.checkpoint.create_seed_checkpoint:
            folder.confirm(trainer.config)
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
            if trainer.benchmark is not None:
                peak_memory = trainer.metrics_processor.max_reserved_gib()
                trainer.benchmark.finish(folder.path, peak_memory)
        folder.set_state("completed", trainer.step)
    except (Exception, KeyboardInterrupt) as error:
        folder.fail(error)
        raise
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if rank == 0 and trainer.metrics_processor.shapes:
        write_plan(
            folder.path,
            trainer.config,
            world_size,
            gpus_per_node(),
            device_module.get_device_name(),
            trainer.metrics_processor.shapes,
            folder.started,
        )
    return 0
