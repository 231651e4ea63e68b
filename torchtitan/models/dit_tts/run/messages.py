"""Log messages at the start and at the end of a run's training."""

import torch
from torch import nn
from torchtitan.tools.logging import logger

from torchtitan.models.dit_tts.infra.cpu_kernels import multiplies_bfloat16
from torchtitan.models.dit_tts.run.checkpointing import RunCheckpointer


def log_start(
    checkpointer: RunCheckpointer, model: nn.Module, step: int, device: torch.device, devices: str
) -> None:
    """Log what is trained from which step, and warnings. `devices`: number and name of all ranks' devices."""
    config = checkpointer.config
    steps, benchmark = config.training.steps, config.benchmark.enable
    if step >= steps:
        logger.info(f"The run is complete: step {step} of {steps}; nothing is left to train")
        return
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, total = sum(n for n, learns in sizes if learns), sum(n for n, _ in sizes)
    parameters = f"{total:,} parameters"
    if trained < total:
        parameters = f"{trained:,} of {parameters}"
    last = "the benchmark's end" if benchmark else steps
    logger.info(
        f"Training {config.model.flavor} ({parameters}) from step {step + 1} to {last} on {devices}; "
        f"run folder: {checkpointer.run_folder.path}"
    )
    narrow = config.training.mixed_precision_param == "bfloat16"
    if narrow and not multiplies_bfloat16(device):
        logger.warning(
            "bfloat16 is many times slower than float32 on this CPU, which has no instructions for it; "
            "stop and add --training.mixed_precision_param float32"
        )
    if not checkpointer.writes and not benchmark:
        key = "load_only = true" if config.checkpoint.enable else "enable = false"
        logger.warning(f"Nothing will be saved: [checkpoint] {key}")


def log_end(checkpointer: RunCheckpointer, step: int) -> None:
    """Log the paths of the weights of the last step and of the best one."""
    folder = checkpointer.run_folder.path / checkpointer.config.checkpoint.folder
    where = f"checkpoint: {folder}/step-{step}" if checkpointer.writes else "nothing was saved"
    best = checkpointer.best_step
    kept = f"; best step: {best} (--step best)" if best is not None else ""
    logger.info(f"Trained to step {step}; {where}{kept}")
