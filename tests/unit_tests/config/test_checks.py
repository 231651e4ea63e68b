"""Settings that cannot work are refused before anything is built; settings that can are not."""

import tomllib
from contextlib import nullcontext

import pytest

from torchtitan.models.dit_tts.config.checks import (
    batch_split,
    data_parallel_degree,
    validate_config,
)
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import config_from_dict, resolve
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model_config import model_flavors

FLAVORS = list(model_flavors())
GRAPHS = "compile.enable = true\ncompile.mode = 'reduce-overhead'\n"
TWO_STEPS = "training.global_batch_size = 16\ntraining.local_batch_size = 8\n"
FLOAT8 = "model.converters = ['float8']\nquantize.linear.float8.emulate = true\n"
TIMED = "benchmark.enable = true\nbenchmark.steps = 4\n"


def validate(toml: str, world_size: int = 1) -> None:
    config = resolve(config_from_dict(tomllib.loads(toml), "test"))
    validate_config(config, world_size, FLAVORS)


def refused(toml: str, *words: str, world_size: int = 1) -> None:
    """One message without a full stop that holds all the words: the key, found and allowed values."""
    with pytest.raises(InputError) as caught:
        validate(toml, world_size)
    message = str(caught.value)
    assert "\n" not in message and ". " not in message and not message.endswith(".")
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "toml, ranks, words",
    [
        ("model.flavor = '2B'", 1, ["[model] flavor", "'2B'", "debug, 800M, 3B, 8B"]),
        ("model.name = 'llama3'", 1, ["[model] name", "'llama3'", "'dit_tts'"]),
        ("job.experiment = 'a/b'", 1, ["[job] experiment", "'a/b'", "'/'"]),
        ("job.experiment = '..'", 1, ["[job] experiment", "'..'"]),
        # Numbers
        ("training.steps = 0", 1, ["[training] steps = 0", "greater than 0"]),
        ("training.max_norm = nan", 1, ["[training] max_norm = nan", "greater than 0"]),
        ("objective.logit_std = 0", 1, ["[objective] logit_std = 0", "greater than 0"]),
        ("optimizer.lr = -1", 1, ["[optimizer] lr = -1", "not be negative"]),
        ("objective.text_dropout = 1.5", 1, ["[objective] text_dropout = 1.5", "from 0 to 1"]),
        ("ema.decay = -0.1", 1, ["[ema] decay = -0.1", "from 0 to 1"]),
        ("training.local_batch_size = -1", 1, ["local_batch_size = -1", "negative"]),
        # Data
        ("data.num_buckets = 9", 1, ["[data] num_buckets = 9", "from 1 to 8"]),
        ("data.bucket_frames = [50, 40]", 1, ["[data] bucket_frames = [50, 40]", "ascending"]),
        ("data.bucket_frames = [50, 800]", 1, ["ends at [800]", "max_frames = 768"]),
        ("data.max_speaker_frames = 383", 1, ["max_speaker_frames = 383", "patch_size = 4"]),
        ("data.path = ['a', 'b']\ndata.weights = [1]", 1, ["weights has 1 numbers", "2 datasets"]),
        ("data.path = ['a', 'b']\ndata.weights = [1, 0]", 1, ["weights = [1, 0]", "1e-6"]),
        ("data.path = ['a', 'b']\ndata.weights = [1, nan]", 1, ["weights = [1, nan]", "1e-6"]),
        ("data.balance_beta = 1", 1, ["balance_beta = 1", "below 1"]),
        ("data.duration_alpha = nan", 1, ["duration_alpha = nan", "from -10 to 10"]),
        ("data.duration_offset_seconds = -1", 1, ["duration_offset_seconds = -1"]),
        ("data.max_corrupt_fraction = 2", 1, ["[data] max_corrupt_fraction = 2"]),
        ("data.prefetch_batches = 0", 1, ["prefetch_batches = 0", "num_workers = 2"]),
        # Ranks and batches
        ("parallelism.data_parallel_replicate_degree = 2", 1, ["degree 2 x", "1 processes"]),
        (
            "parallelism.data_parallel_replicate_degree = 2\nparallelism.data_parallel_shard_degree = 3",
            8,
            ["data_parallel_replicate_degree 2", "data_parallel_shard_degree 3", "6", "8"],
        ),
        (
            "parallelism.data_parallel_shard_degree = 0",
            1,
            ["data_parallel_shard_degree = 0", "at least 1"],
        ),
        (
            "parallelism.data_parallel_replicate_degree = -1",
            2,
            ["data_parallel_replicate_degree = -1", "at least 1"],
        ),
        ("parallelism.tensor_parallel_degree = 2", 2, ["tensor_parallel_degree = 2", "to 1"]),
        (
            "training.local_batch_size = 4\ntraining.global_batch_size = 12",
            2,
            ["global_batch_size = 12", "local_batch_size 4 x 2 ", "= 8"],
        ),
        (
            "training.local_batch_size = 4\ntraining.global_batch_size = 2",
            1,
            ["global_batch_size = 2", "4"],
        ),
        ("training.global_batch_size = 0", 1, ["global_batch_size = 0"]),
        (
            "training.global_batch_size = 9",
            2,
            ["global_batch_size = 9", "2 data-parallel ranks"],
        ),
        (
            "training.local_batch_size = 8\ndata.batch_multiple = 6",
            4,
            ["[data] batch_multiple = 6", "4 data-parallel ranks x 1", "multiple of 4"],
        ),
        (
            "training.local_batch_size = 2\ntraining.global_batch_size = 24",
            4,
            ["[data] batch_multiple = 8", "x 3 accumulation steps", "12"],
        ),
        (
            "training.global_batch_size = 12",
            1,
            ["comes to 12 samples", "[data] batch_multiple = 8"],
        ),
        # Text
        ("encoder.model = 't5'", 1, ["[encoder] model", "'t5'", "'bytes'"]),
        (
            "data.conditioning = ['speaker', 'speaker']",
            1,
            ["[data] conditioning", "['speaker', 'speaker']", "each once"],
        ),
        ("data.conditioning = ['age']", 1, ["[data] conditioning = ['age']", "language, quality"]),
        ("encoder.vocab_size = -1", 1, ["[encoder] vocab_size = -1"]),
        ("data.conditioning_dropout = nan", 1, ["[data] conditioning_dropout = nan"]),
        # Benchmarks
        ("benchmark.enable = true", 1, ["would never end"]),
        ("benchmark.warmup_steps = 0", 1, ["[benchmark] warmup_steps = 0", "greater than 0"]),
        (
            TIMED + "encoder.model = 'google-t5/t5-base'\nencoder.frozen = false",
            1,
            ["frozen = false is not supported", "set frozen = true"],
        ),
        # Checkpoints
        ("checkpoint.keep_latest_k = 1", 1, ["[checkpoint] keep_latest_k = 1", "at least 2"]),
        ("checkpoint.folder = '.'", 1, ["[checkpoint] folder = '.'", "without '/'"]),
        ("checkpoint.folder = '/data'", 1, ["[checkpoint] folder = '/data'", "without '/'"]),
        (
            "checkpoint.initial_load_path = 'no/where'",
            1,
            ["[checkpoint] initial_load_path", "'no/where'", "not a folder"],
        ),
        (
            "checkpoint.enable = true\ncheckpoint.create_seed_checkpoint = true",
            2,
            ["[checkpoint] create_seed_checkpoint", "2 processes", "needs 1"],
        ),
        (
            "checkpoint.enable = false\ncheckpoint.create_seed_checkpoint = true",
            1,
            ["[checkpoint] create_seed_checkpoint", "enable = false", "enable = true"],
        ),
        ("validation.enable = true", 1, ["[validation] enable = true", "false"]),
        # Speed and memory
        (
            "activation_checkpoint.mode = 'memory_budget'",
            1,
            ["mode = 'memory_budget'", "[compile] enable = true"],
        ),
        ("activation_checkpoint.memory_budget = 7", 1, ["memory_budget = 7", "from 0 to 1"]),
        (
            GRAPHS + TWO_STEPS,
            1,
            ["2 accumulation steps do not allow; set it to 'default'"],
        ),
        (
            f"{GRAPHS}{TWO_STEPS}compile.components = ['encoders']",
            1,
            ["2 accumulation steps"],
        ),
        (
            f"{GRAPHS}{TIMED}benchmark.warmup_steps = 2",
            1,
            ["warmup_steps = 2 with [compile] mode = 'reduce-overhead'"],
        ),
        ("training.dtype = 'bfloat16'", 1, ["[training] dtype = 'bfloat16' is not supported"]),
        (
            "optimizer.state_dtype = 'bfloat16'\noptimizer.beta2 = 0.9995",
            1,
            ["at most 0.999"],
        ),
        # The shard degree -1 stands for what is left of the processes.
        ("training.enable_cpu_offload = true", 1, ["enable_cpu_offload = true is not supported"]),
        (
            "training.enable_cpu_offload = true\nparallelism.data_parallel_replicate_degree = 2",
            2,
            ["enable_cpu_offload = true is not supported"],
        ),
        (GRAPHS, 2, ["gathered weights of 2 data-parallel ranks"]),
        (
            GRAPHS + "parallelism.data_parallel_replicate_degree = 2",
            2,
            ["'default' or 'max-autotune-no-cudagraphs'"],
        ),
        (GRAPHS + "compile.backend = 'eager'", 1, ["only the backend 'inductor'"]),
        ("optimizer.name = 'Lion'", 1, ["allowed are Adam, AdamW and Muon"]),
        ("optimizer.name = 'Muon'\noptimizer.state_dtype = '8bit'", 1, ["only with AdamW"]),
        (
            "optimizer.name = 'Muon'\ntraining.enable_cpu_offload = true",
            2,
            ["enable_cpu_offload"],
        ),
        (
            "optimizer.state_dtype = '8bit'\n"
            "checkpoint.enable = true\ncheckpoint.async_mode = 'async'",
            1,
            ["set async_mode to 'disabled'"],
        ),
        ("optimizer.muon_lr = -1", 1, ["must not be negative"]),
        ("model.converters = ['float9']", 1, ["allowed is 'float8'"]),
        (
            "model.converters = ['float8']\ntraining.mixed_precision_param = 'float32'",
            1,
            ["mixed_precision_param = 'float32'"],
        ),
        (FLOAT8 + "compile.enable = true", 1, ["emulate = true does not compile"]),
        (
            FLOAT8 + "quantize.linear.float8.enable_fsdp_float8_all_gather = true",
            1,
            ["is not supported"],
        ),
    ],
)
def test_refused(toml, ranks, words):
    refused(toml, *words, world_size=ranks)


@pytest.mark.parametrize(
    "toml, ranks",
    [
        (
            f"{GRAPHS}training.global_batch_size = 16\ntraining.local_batch_size = 16",
            1,
        ),
        (  # the component "loss" has no mode
            f"{GRAPHS}{TWO_STEPS}compile.components = ['loss']",
            1,
        ),
        (
            f"{GRAPHS}{TIMED}benchmark.warmup_steps = 3",
            1,
        ),
        (
            f"{TWO_STEPS}compile.enable = true\ncompile.mode = 'max-autotune-no-cudagraphs'",
            1,
        ),
        ("optimizer.state_dtype = 'bfloat16'\noptimizer.beta2 = 0.999", 1),
        ("training.enable_cpu_offload = true", 2),
        ("training.enable_cpu_offload = true\nparallelism.data_parallel_replicate_degree = 2", 4),
        ("data.num_workers = 0\ndata.prefetch_batches = 0", 1),
        ("data.bucket_frames = [64, 768]\ndata.path = ['a', 'b']\ndata.weights = [1e-6, 2]", 1),
        ("encoder.model = '/was/here/when/the/run/began'", 1),
    ],
)
def test_allowed(toml, ranks):
    validate(toml, ranks)


FLEX, VARLEN = "attention.backend = 'flex'\n", "attention.backend = 'varlen'\n"


@pytest.mark.parametrize(
    "toml, message",
    [
        (FLEX, r"flex.*\[compile\] enable"),
        (VARLEN + "training.mixed_precision_param = 'float32'", "mixed_precision_param"),
        (FLEX + "compile.enable = true", None),
        (VARLEN, None),
    ],
)
def test_what_an_accelerator_cannot_do(toml, message):
    config = config_from_dict(tomllib.loads(toml), "test")
    validate_config(config, 1, FLAVORS, "cpu")
    with pytest.raises(InputError, match=message) if message else nullcontext():
        validate_config(config, 1, FLAVORS, "cuda")


@pytest.mark.parametrize(
    "replicate, shard, world_size, expected",
    [(1, -1, 1, 1), (1, -1, 8, 8), (2, -1, 8, 8), (4, 2, 8, 8), (8, 1, 8, 8), (1, 6, 6, 6)],
)
def test_degrees_that_multiply(replicate, shard, world_size, expected):
    config = JobConfig()
    config.parallelism.data_parallel_replicate_degree = replicate
    config.parallelism.data_parallel_shard_degree = shard
    assert data_parallel_degree(config, world_size) == expected


@pytest.mark.parametrize(
    "local, total, degree, expected",
    [(4, -1, 3, (12, 1)), (4, 12, 3, (12, 1)), (4, 48, 3, (48, 4)), (0, 12, 4, (12, 1))],
)
def test_a_global_batch_is_split(local, total, degree, expected):
    training = JobConfig().training
    training.local_batch_size, training.global_batch_size = local, total
    assert batch_split(training, degree) == expected


def test_a_resume_needs_no_initial_checkpoint(tmp_path):
    """Upstream looks at initial_load_path only while the run has no checkpoint folder of its own."""
    toml = f"""
        job.dump_folder = '{tmp_path}'
        job.experiment = 'x'
        checkpoint.initial_load_path = 'gone'
    """
    refused(toml, "initial_load_path")
    (tmp_path / "x" / "checkpoint").mkdir(parents=True)
    validate(toml)
