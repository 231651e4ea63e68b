"""Division of a global batch among data-parallel ranks and micro-batches."""

from torchtitan.models.dit_tts.config.job_config import JobConfig, Training
from torchtitan.models.dit_tts.config.keys import conflict
from torchtitan.models.dit_tts.errors import require


def data_parallel_degree(config: JobConfig, world_size: int) -> int:
    """Ranks that see different data: replicas times shards."""
    p = config.parallelism
    tensor, replicate = p.tensor_parallel_degree, p.data_parallel_replicate_degree
    if tensor > 1 and p.backend != "megatron":
        why = "set it to 1, or backend to 'megatron'"
        raise conflict(config, "parallelism.tensor_parallel_degree parallelism.backend", why)
    shard = p.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // (replicate * tensor))
    product = replicate * shard * tensor
    by_tensor = f" x tensor_parallel_degree {tensor}" if tensor > 1 else ""
    require(
        product == world_size and shard > 0,
        f"[parallelism] data_parallel_replicate_degree {replicate} x data_parallel_shard_degree "
        f"{shard}{by_tensor} = {product}, but {world_size} processes were started; make the "
        f"product {world_size}, or --nproc x --nodes {product}; a shard degree of -1 takes all that are left",
    )
    return replicate * shard


def fewest_micro_batches(samples: int, largest: int) -> int:
    """The fewest micro-batches of one size, at most `largest` samples each (0: any), that are `samples`."""
    steps = range(1, samples + 1)
    return next(n for n in steps if samples % n == 0 and (not largest or samples // n <= largest))


def batch_split(training: Training, dp_degree: int) -> tuple[int, int]:
    """(samples of a global batch of the longest bucket, accumulation steps).

    With `local_batch_size` above 0 by upstream's rule, where a negative `global_batch_size` means one
    accumulation step; with 0 each rank takes its part of the global batch in as few micro-batches as
    `max_local_batch_size` allows.
    """
    total, local = training.global_batch_size, training.local_batch_size
    if local == 0:
        require(
            total > 0 and total % dp_degree == 0,
            f"[training] global_batch_size = {total} is not a multiple of {dp_degree} data-parallel "
            f"ranks, as local_batch_size = 0 needs; change one of them",
        )
        return total, fewest_micro_batches(total // dp_degree, training.max_local_batch_size)
    per_pass = local * dp_degree
    if total < 0:
        return per_pass, 1
    require(
        total >= per_pass and total % per_pass == 0,
        f"[training] global_batch_size = {total} is not a multiple of local_batch_size {local} x "
        f"{dp_degree} data-parallel ranks = {per_pass}; change one of them",
    )
    return total, total // per_pass
