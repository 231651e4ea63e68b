"""Runs one training process from a config: checks, trains, and leaves a state that tools can read."""

import os
import signal
from types import FrameType

from torchtitan.models.dit_tts.errors import (
    failure_state,
    quiet_known_warnings,
    report_input_errors,
)
from torchtitan.models.dit_tts.plan.dry_run import run_dry, take_options


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM, from a scheduler or from torchrun when another rank failed, as an exception."""
    raise KeyboardInterrupt("terminated by SIGTERM")


@report_input_errors
def train(args: list[str]) -> int:
    """Trains as the command line says; with --dry-run, says what that would take. Returns the exit
    status.

    Raises:
        InputError: a mistake in config or data.
    """
    if not {"-h", "--help", "--help-all"}.isdisjoint(args):
        from torchtitan.models.dit_tts.config.help import print_help

        return print_help("--help-all" in args)
    dry_run = take_options(args)
    if dry_run is not None:
        return run_dry(dry_run)
    # torch and torchtitan take seconds to import, and a process needs its group's address first.
    from torchtitan.models.dit_tts.trainer import DiTTTSTrainer, set_single_process_defaults

    set_single_process_defaults()

    import torch

    from torchtitan.models.dit_tts import model_flavors
    from torchtitan.models.dit_tts.benchmark.loader import as_benchmark
    from torchtitan.models.dit_tts.config.checks import (
        data_parallel_degree,
        validate_config,
        validate_machine,
    )
    from torchtitan.models.dit_tts.config.manager import load_config, run_folder_path, upstream_view
    from torchtitan.models.dit_tts.plan.compare import ran_shapes, write_plan
    from torchtitan.models.dit_tts.run_folder import RunFolder, gpus_per_node
    from torchtitan.tools.logging import init_logger, logger
    from torchtitan.tools.utils import device_module

    trainer = None
    folder = None
    try:
        config = load_config(args)
        if config.benchmark.enable:
            config = as_benchmark(config)
        world_size = int(os.environ["WORLD_SIZE"])
        validate_config(config, world_size, list(model_flavors()))
        validate_machine(config)
        dp_degree = data_parallel_degree(config, world_size)
        init_logger()
        quiet_known_warnings()
        if os.environ["RANK"] != "0":
            logger.setLevel("WARNING")  # the ranks' logs are alike; rank 0's is enough
        folder = RunFolder(run_folder_path(config), int(os.environ["RANK"]), config)
        folder.start()
        logger.info(f"Run folder: {folder.path}")
        signal.signal(signal.SIGTERM, raise_terminated)
        trainer = DiTTTSTrainer(upstream_view(config, folder.path, dp_degree), folder)
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
            if trainer.benchmark is not None:
                most = trainer.metrics_processor.most_reserved_gib()
                trainer.benchmark.finish(folder.path, most)
        folder.set_state("completed", trainer.step)
    except (Exception, KeyboardInterrupt) as error:
        if folder is not None:
            folder.fail(failure_state(error), str(error).split("\n")[0] or type(error).__name__)
        raise
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if folder.rank == 0 and trainer.metrics_processor.shapes:
        write_plan(
            folder.path,
            config,
            world_size,
            gpus_per_node(),
            device_module.get_device_name(),
            ran_shapes(trainer.metrics_processor.shapes),
            folder.started,
        )
    return 0
