"""`--dry-run`: the plan of a training command without a named GPU; nothing is started."""

import os

from torchtitan.models.dit_tts.run.launcher import launcher_number

_GPUS = "--dry-run-gpus"


def run_dry(config_args: list[str], gpus: int | None) -> int:
    """Prints the report. Returns the exit status. `gpus`: processes that the run would have; None:
    WORLD_SIZE, or the degrees in [parallelism].
    """
    if launcher_number("RANK", "0") > 0:
        return 0  # under torchrun, one process prints it
    from titan_tts.plan.plan import make_summary
    from titan_tts.plan.report import summary_lines
    from torchtitan.models.dit_tts.config.manager import load_config
    from torchtitan.models.dit_tts.errors import quiet_known_warnings
    from torchtitan.models.dit_tts.run.teacher import with_teacher

    quiet_known_warnings()
    config = with_teacher(load_config(config_args))
    if gpus is not None:
        why = _GPUS
    elif "WORLD_SIZE" in os.environ:
        gpus, why = launcher_number("WORLD_SIZE"), "the number of processes"
    else:
        degrees = config.parallelism
        gpus = max(1, degrees.data_parallel_replicate_degree)
        gpus *= max(1, degrees.data_parallel_shard_degree) * max(1, degrees.tensor_parallel_degree)
        why = f"the degrees in [parallelism] that are set; {_GPUS} N for others"
    print("\n".join(summary_lines(*make_summary(config, gpus), why)))
    return 0
