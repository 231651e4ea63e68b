"""Runs one training process from a config: checks, trains, and leaves a state that tools can read."""

import os
import sys
import time
import traceback
from typing import Callable

from torchtitan.models.dit_tts.errors import InputError

EXIT_INPUT_ERROR = 2


def report_input_errors(function: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Turns an InputError into its sentence on stderr and exit status 2.

    Most mistakes are met by every rank, a damaged sample by one. The first rank of a machine prints
    at once and the launcher then ends the others; these wait their turn, so that one of them speaks.
    """

    def wrapped(args: list[str]) -> int:
        try:
            return function(args) or 0
        except InputError as error:
            if os.environ.get("TITAN_TTS_TRACEBACK"):
                traceback.print_exc()
            time.sleep(2.0 * int(os.environ.get("LOCAL_RANK", "0")))
            print(f"error: {error}", file=sys.stderr, flush=True)
            return EXIT_INPUT_ERROR

    return wrapped


def failure_state(error: Exception) -> str:
    """The state in which an error leaves a run: oom, timeout or failed."""
    import torch

    said = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in said:
        return "oom"
    # gloo says "Timed out", NCCL "timeout"; both raise kinds of RuntimeError.
    if isinstance(error, RuntimeError) and ("timed out" in said or "timeout" in said):
        return "timeout"
    return "failed"


@report_input_errors
def train(args: list[str]) -> int:
    """Trains as the command line says. Returns the exit status.

    Raises:
        InputError: a mistake in config or data.
    """
    # torch and torchtitan take seconds to import, and a process needs its group's address first.
    from torchtitan.models.dit_tts.trainer import DiTTTSTrainer, set_single_process_defaults

    set_single_process_defaults()

    import torch

    from torchtitan.models.dit_tts import model_flavors
    from torchtitan.models.dit_tts.config import in_folder, load_config, run_folder_path
    from torchtitan.models.dit_tts.run_folder import RunFolder
    from torchtitan.models.dit_tts.validate import validate_config
    from torchtitan.tools.logging import init_logger, logger

    trainer = None
    folder = None
    try:
        config = load_config(args)
        validate_config(config, int(os.environ["WORLD_SIZE"]), list(model_flavors()))
        init_logger()
        folder = RunFolder(run_folder_path(config), int(os.environ["RANK"]))
        folder.start(config)
        logger.info(f"Run folder: {folder.path}")
        # Upstream writes checkpoints, traces and snapshots below dump_folder.
        trainer = DiTTTSTrainer(in_folder(config, folder.path))
        folder.start(config, replace=True)
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
        folder.set_state("completed", trainer.step)
    except Exception as error:
        if folder is not None:
            step = trainer.step if trainer is not None else 0
            folder.set_state(failure_state(error), step, error=str(error).split("\n")[0])
        raise
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0
