"""Settings that cannot work are refused before anything is built; settings that can are not."""

import re
import tomllib

import pytest

from torchtitan.models.dit_tts.config import checks
from torchtitan.models.dit_tts.config.batch_split import batch_split, data_parallel_degree
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import config_from_dict, resolve
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model_config import model_flavors

FLAVORS = list(model_flavors())


def validate(toml: str, world_size: int = 1, accelerator: str | None = None) -> None:
    """Statements of TOML with a semicolon between them."""
    config = config_from_dict(tomllib.loads(toml.replace("; ", "\n")), "test")
    validate_config(resolve(config), world_size, FLAVORS, accelerator)


# Processes | settings | words of the message: key, value found, what is allowed
REFUSED = """
1 | model.flavor = '60m' | [model] flavor = '60m' | did you mean 60M? allowed are debug, 8M, 18M, 60M
1 | training.seq_len = 4096 | [training] seq_len = 4096 | use [data] max_frames
1 | training.max_norm = nan | [training] max_norm = nan | finite
1 | training.steps = 1000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000 | [training] steps = 1000 | below 2^63
1 | sampling = {min_t = 0.6, max_t = 0.5} | min_t = 0.6 | max_t = 0.5
1 | sampling = {steps = 5, solver = 'heun'} | steps = 5 | 'heun' | even
1 | sampling.guidance = 'joint' | 'joint' | text_scale = 3 | speaker_scale = 0 | the same
3 | LIMITED | batch_multiple = 8: it cannot | 3 data-parallel ranks x 4 accumulation steps | a multiple of 12
1 | data = {batching = 'packed', bucket_frames = [64, 768]} | bucket_frames = [64, 768] | no buckets | leave
2 | data = {batching = 'packed', longest_per_row = 16}; training.local_batch_size = 8 | longest_per_row = 16 | 32 / 4 = 8 samples | a multiple
1 | data = {batching = 'packed', num_buckets = 1}; objective.loss_on_padding = true | loss_on_padding = true | 'packed'
1 | data.bucket_frames = [64, 768]; objective.loss_on_padding = true | loss_on_padding = true | 2 lengths | num_buckets = 1
1 | data.bucket_frames = [64, 769] | [64, 769] with max_frames = 768 | the last
1 | data.bucket_frames = [1, 2, 3, 4, 5, 6, 7, 8, 9] | up to 8
1 | data.weights = [1.0, 2.0] | weights has 2 numbers | path 1 datasets
1 | training.global_batch_size = 12 | comes to 12 samples | batch_multiple = 8
1 | data.conditioning = ['speaker', 'speaker'] | each once
1 | data.bucket_frames = [50, 40] | [data] bucket_frames = [50, 40] | ascending
1 | data.balance_beta = 1.0 | [data] balance_beta = 1.0, but it must be at least 0 and below 1
1 | data.weights = [1.0, 1e-7] | [1.0, 1e-07], but it must be at least 1e-06 and at most 1000000.0
1 | ema.decays = [1.1] | [1.1], but it must be at least 0 and at most 1
1 | lora.alpha = 0 | [lora] alpha = 0, but it must be greater than 0
1 | validation.batch_size = 1 | = 1, but it must be at least 2
1 | validation.times = [0.0] | greater than 0 and at most 1
1 | data.max_speaker_frames = 383 | max_speaker_frames = 383 | patch_size = 4
4 | parallelism.data_parallel_shard_degree = 3 | = 3, but 4 processes | product 4, or --nproc x --nodes 3
1 | parallelism.data_parallel_shard_degree = -2 | shard_degree -2
2 | parallelism.tensor_parallel_degree = 2 | tensor_parallel_degree = 2 | to 1 | 'megatron'
1 | megatron.fp8 = true | [megatron] has no effect | 'torchtitan'
1 | parallelism.backend = 'megatron'; megatron.transformer_impl = 'transformer_engine' | needs a GPU | 'local'
1 | parallelism.backend = 'megatron'; megatron.sequence_parallel = true | degree = 1, | at least 2
2 | SPLIT; megatron = {transformer_impl = 'transformer_engine', sequence_parallel = true} | needs a degree
1 | lora.rank = 4 | [lora] rank = 4 | set [checkpoint] initial_load_path
1 | lora.rank = 4; benchmark = {enable = true, steps = 4}; optimizer.name = 'Muon' | rank = 4 with [optimizer] name = 'Muon' | to 'AdamW'
2 | SPLIT; lora.rank = 4; benchmark = {enable = true, steps = 4} | rank = 4 | tensor_parallel_degree to 1
2 | SPLIT; model.converters = ['float8'] | not converted | [megatron] fp8
2 | training = {local_batch_size = 4, global_batch_size = 12} | = 12 | local_batch_size 4 x 2  | = 8
2 | training.global_batch_size = 9 | global_batch_size = 9 | 2 data-parallel ranks
1 | encoder.model = 't5' | [encoder] model | 't5' | 'bytes'
1 | data.conditioning = ['age'] | [data] conditioning = ['age'] | language, quality
1 | benchmark.enable = true | nothing would be timed
1 | benchmark = {enable = true, steps = 4}; encoder = {model = 'a/b', frozen = false} | set frozen = true
1 | checkpoint.keep_latest_k = 1 | [checkpoint] keep_latest_k = 1 | at least 2
1 | checkpoint.initial_load_path = 'no/where' | initial_load_path | 'no/where' | not a folder
2 | checkpoint = {enable = true, create_seed_checkpoint = true} | 2 processes | needs 1
1 | validation.times = [] | [validation] times = [] | one or more
1 | HELD_OUT; validation.keep_best = 'heldout_loss_at_0.85' | 'heldout_loss_at_0.85' | one of times
1 | HELD_OUT; validation.keep_best = 'wer' | keep_best = 'wer' | need [samples] freq
1 | SPEECH | [samples] freq = 9 | no held-out texts | give its path
1 | activation_checkpoint.mode = 'memory_budget' | 'memory_budget' | [compile] enable = true
1 | GRAPHS; benchmark = {enable = true, steps = 4, warmup_steps = 2} | warmup_steps = 2 with [compile]
2 | GRAPHS | 2 data-parallel ranks do not allow | set it to 'default'
1 | optimizer = {name = 'Muon', state_dtype = '8bit'} | name = 'Muon' | only AdamW
1 | optimizer.state_dtype = '8bit'; checkpoint.async_mode = 'async' | '8bit' | to 'disabled'
1 | model.converters = ['mx'] | converters = ['mx'] | 'float8'
1 | model.converters = ['float8']; training.mixed_precision_param = 'float32' | to 'bfloat16'
1 | job.experiment = 'a/b' | 'a/b' | without '/'
1 | validation.times = [0.5, 0.5] | different times
1 | parallelism.backend = 'megatron'; megatron.fp8 = true | are TransformerEngine's
1 | LENGTHS; parallelism.backend = 'megatron' | nothing to divide | 'torchtitan'
2 | SPLIT; training.enable_cpu_offload = true | enable_cpu_offload = true with | degree = 2 | to false
1 | profiling.enable_profiling = true | needs a GPU
1 | model.text_positions = 'aligned'; data.num_buckets = 1; objective.loss_on_padding = true | loss_on_padding = true
1 | LENGTHS; data.conditioning = ['duration'] | which predicts it
1 | encoder.convention = 'echo'; model.text_positions = 'aligned' | need texts as they are
2 | training.enable_cpu_offload = true; optimizer.name = 'Muon' | would run on the CPU
1 | training.dtype = 'bfloat16' | [training] dtype = 'bfloat16' | 'float32'
2 | training.enable_cpu_offload = true; REPLICAS | enable_cpu_offload = true | sharded
1 | model.flavor = 'duration' | [objective] text_dropout = 0.1 with | a mean over all texts | to 0.0
1 | ema.decays = [0.999, 0.99900000000001] | 0.99900000000001] | different numbers
1 | quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp = true | is not supported
1 | job.experiment = 'LONG_NAMEx' | at most 255 bytes
1 | checkpoint.folder = '..' | folder = '..' | must
1 | checkpoint = {enable = false, create_seed_checkpoint = true} | enable = false | needs 1
1 | checkpoint = {enable = false, initial_load_path = 'x'} | enable = false | enable = true
1 | samples.freq = 9; validation = {enable = false, path = '/h'} | no held-out texts
1 | HELD_OUT; validation.keep_best = 'seconds_error' | = 'seconds_error' | is not a measured figure
1 | HELD_OUT; SPEECH; samples.speaker_scorer = 'resemblyzer'; validation.keep_best = 'speaker_similarity_raw' | = 'speaker_similarity_raw' | is not a
1 | parallelism.data_parallel_shard_degree = 0 | shard_degree 0
1 | training.global_batch_size = -1 | global_batch_size = -1 is not
1 | training = {local_batch_size = 4, global_batch_size = 0} | = 0 is not a multiple
1 | model.converters = ['float8']; quantize.linear.float8.emulate = true; compile.enable = true | does not compile
2 | training.enable_cpu_offload = true; optimizer.state_dtype = '8bit' | would run on the CPU
2 | SPLIT; GRAPHS | [compile] mode = 'reduce-overhead' | degree = 2: | 'default'
1 | parallelism.backend = 'megatron'; megatron.use_te_attn = true | are TransformerEngine's
1 | LENGTHS; model.text_positions = 'aligned' | text_positions = 'aligned' with | to 'none'
1 | compile = {enable = true, components = ['text_encoder']} | model = 'bytes' | take 'text_encoder' out
1 | compile = {enable = true, components = ['text_encoder']}; encoder = {model = 'a/b', frozen = false} | frozen = false
"""
# The shard degree -1 stands for the processes that are left; CUDA graphs of a frozen text encoder have no gradients.
ALLOWED = """
1 | GRAPHS; training = {global_batch_size = 16, local_batch_size = 16}
1 | GRAPHS; TWO_STEPS
2 | GRAPHS; compile.components = ['loss']
2 | GRAPHS; compile.components = ['loss', 'text_encoder']; encoder.model = '/was/here'
2 | training.enable_cpu_offload = true
2 | data = {batching = 'packed', longest_per_row = 8}; training.max_local_batch_size = 8
1 | data = {bucket_frames = [64, 768], path = ['a', 'b'], weights = [1e-6, 2]}
1 | data = {prefetch_batches = 1, num_workers = 0, seed = 9223372036854775807}; validation.times = [1.0]
1 | checkpoint.keep_latest_k = 2
1 | data.bucket_frames = [1, 2, 3, 4, 5, 6, 7, 768]
1 | GRAPHS; benchmark = {enable = true, steps = 4, warmup_steps = 3}
1 | LENGTHS; HELD_OUT; validation.keep_best = 'within_10_percent'
1 | HELD_OUT; validation.keep_best = 'heldout_loss_at_0.9'
1 | HELD_OUT; ema.decays = [0.99995, 0.9999995]; validation.keep_best = 'heldout_loss_ema:0.9999995'
1 | HELD_OUT; SPEECH; samples.recognizer = 'words:one'; validation.keep_best = 'wer'
1 | HELD_OUT; SPEECH; samples.speaker_scorer = 'resemblyzer'; validation.keep_best = 'speaker_similarity'
1 | encoder.model = '/was/here/when/the/run/began'
1 | job.experiment = 'LONG_NAME'; training.max_norm = inf; validation.keep_best = 'opinion'
1 | benchmark = {enable = true, steps = 5}; ema.decays = [0.0, 1.0]
1 | model.converters = ['float8']; quantize.linear.float8.emulate = true; training.mixed_precision_param = 'float32'
1 | optimizer.state_dtype = '8bit'; checkpoint = {enable = false, async_mode = 'async'}
1 | HELD_OUT; validation.keep_best = 'text_gain_at_0.9'
1 | HELD_OUT; SPEECH; samples.opinion = 'dnsmos'; validation.keep_best = 'opinion'
1 | HELD_OUT; SPEECH; samples.recognizer = 'words:one'; validation.keep_best = 'cer'
"""
SHORT = {
    "LONG_NAME": "n" * 255,
    "GRAPHS": "compile.enable = true; compile.mode = 'reduce-overhead'",
    "EDGES": "data.bucket_frames = [64, 768]",
    "LIMITED": "training.global_batch_size = 96; training.max_local_batch_size = 8",
    "TWO_STEPS": "training.global_batch_size = 16; training.local_batch_size = 8",
    "HELD_OUT": "validation.enable = true; validation.path = '/heldout'",
    "SPLIT": "parallelism = {backend = 'megatron', tensor_parallel_degree = 2}",
    "SPEECH": "samples.freq = 9",
    "LENGTHS": "model.flavor = 'duration'; objective.text_dropout = 0.0; activation_checkpoint.mode = 'none'",
    "TE": "parallelism.backend = 'megatron'; megatron.transformer_impl = 'transformer_engine'",
    "REPLICAS": "parallelism.data_parallel_replicate_degree = 2",
}


def cases(table: str) -> list[list[str]]:
    for name, settings in SHORT.items():
        table = table.replace(name, settings)
    return [line.split(" | ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("case", cases(REFUSED), ids=lambda case: case[1])
def test_refused(case):
    ranks, toml, *words = case
    with pytest.raises(InputError) as caught:
        validate(toml, int(ranks))
    message = str(caught.value)
    assert "\n" not in message and ". " not in message and not message.endswith(".")
    for word in words:
        assert word in message, message


def test_a_bound_is_shown_with_two_digits():
    with pytest.raises(InputError, match=r"at most 1\.75$"):
        validate("sampling.sway = 2.0")


@pytest.mark.parametrize("ranks, toml", cases(ALLOWED))
def test_allowed(ranks, toml):
    validate(toml, int(ranks))


VARLEN = "attention.backend = 'varlen'"
ENGINE = "megatron.transformer_impl = 'transformer_engine'"
PROFILED = "profiling.enable_profiling = true"
REFUSED_ON_A_GPU = f"""
{VARLEN}; training.mixed_precision_param = 'float32' | with [training] mixed_precision_param = 'float32'
data.batching = 'packed'; training.mixed_precision_param = 'float32' | [data] batching = 'packed' with [training] mixed
{PROFILED}; profiling.profile_freq = 3 | profile_freq = 3: it must be at least profiler_warmup + profiler_active = 4
TE; compile.enable = true | with [compile] components
TE; model.converters = ['float8'] | 'transformer_engine': these layers are not converted
TE; megatron.use_te_attn = true | use_te_attn = true with [attention] backend = 'auto'
"""


@pytest.mark.parametrize("toml, message", [row[:2] for row in cases(REFUSED_ON_A_GPU)])
def test_what_an_accelerator_cannot_do(toml, message):
    # The CPU has stand-ins for the kernels, and no events to profile.
    if not {PROFILED, ENGINE} & {*toml.split("; ")}:
        validate(toml, accelerator="cpu")
    with pytest.raises(InputError, match=re.escape(message)):
        validate(toml, accelerator="cuda")
    validate(f"{VARLEN}; compile.enable = true", accelerator="cuda")
    validate(f"{PROFILED}; profiling.profile_freq = 4", accelerator="cuda")
    packed = f"{cases('TE')[0][0]}; {VARLEN}; megatron.use_te_attn = true; megatron.fp8 = true"
    validate(f"{packed}; compile = {{enable = true, components = ['loss']}}", accelerator="cuda")


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch):
    norm = "kernels.modulated_norm = 'triton'"
    validate(norm, accelerator="cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    validate(norm, accelerator="cuda")
    with pytest.raises(InputError, match="modulated_norm = 'triton': it needs a GPU, or TRITON_I"):
        validate(norm, accelerator="cpu")
    with pytest.raises(InputError, match="with .data. batching = 'packed'"):
        validate(f"{norm}; data.batching = 'packed'", accelerator="cuda")


@pytest.mark.parametrize(
    "replicate, shard, tensor, expected",
    [(1, -1, 1, 12), (2, -1, 1, 12), (4, 3, 1, 12), (2, -1, 3, 4), (1, 6, 2, 6)],
)
def test_degrees_that_multiply(replicate, shard, tensor, expected):
    p = JobConfig().parallelism
    p.data_parallel_replicate_degree, p.data_parallel_shard_degree = replicate, shard
    p.tensor_parallel_degree, p.backend = tensor, "megatron"
    assert data_parallel_degree(JobConfig(parallelism=p), 12) == expected


@pytest.mark.parametrize(
    "local, largest, total, degree, steps",
    [
        # A largest size limits no micro-batch that is given.
        *[(4, 2, -1, 3, 1), (4, 2, 12, 3, 1), (4, 2, 48, 3, 4), (0, 0, 12, 4, 1), (0, 0, 96, 3, 1)],
        # 32, 8, 21 and 3 samples of a rank, in equal parts, as few as it allows.
        *[(0, 8, 96, 3, 4), (0, 12, 96, 3, 4), (0, 16, 96, 3, 2), (0, 31, 96, 3, 2)],
        *[
            (0, 32, 96, 3, 1),
            (0, 8, 96, 12, 1),
            (0, 5, 42, 2, 7),
            (0, 7, 42, 2, 3),
            (0, 1, 12, 4, 3),
        ],
    ],
)
def test_a_global_batch_is_split(local, largest, total, degree, steps):
    training = JobConfig().training
    training.local_batch_size, training.max_local_batch_size = local, largest
    training.global_batch_size = total
    assert batch_split(training, degree) == (12 if total < 0 else total, steps)


@pytest.mark.parametrize(
    "toml, device, expected",
    [
        ("training.enable_cpu_offload = true", "cpu", "an accelerator to offload from"),
        ("training.enable_cpu_offload = true", "cuda", ""),
        ("checkpoint.async_mode = 'async_with_pinned_mem'", "cuda", "set it to 'async' or"),
        ("GRAPHS", "cpu", "'reduce-overhead' replays CUDA .* no GPU; set it to 'default' or"),
        ("GRAPHS; compile.components = ['text_encoder']", "cpu", "set it to 'default' or"),
        ("GRAPHS; compile.components = ['loss']", "cpu", ""),
        ("compile.mode = 'max-autotune'", "cpu", ""),
        ("GRAPHS", "cuda", ""),
        ("checkpoint.async_mode = 'async'; samples.recognizer = 'x'", "cpu", ""),
        ("parallelism.backend = 'megatron'", "cpu", "megatron"),
        ("megatron.transformer_impl = 'transformer_engine'", "cuda", "transformer_engine"),
        ("kernels.modulated_norm = 'triton'", "cuda", "triton"),
        ("samples.freq = 1", "cpu", "soundfile matplotlib"),
        ("SPEECH; samples.recognizer = 'x'", "cpu", "soundfile matplotlib jiwer transformers"),
    ],
)
def test_what_the_machine_must_have(toml, device, expected, monkeypatch):
    """An accelerator, which a CPU is not, or packages."""
    [[toml]] = cases(toml)
    config = config_from_dict(tomllib.loads(toml.replace("; ", "\n")), "test")
    needed: list[str] = []
    monkeypatch.setattr(checks, "device_type", device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(checks, "require_modules", lambda *names: needed.extend(names))
    if " to " in expected:
        with pytest.raises(InputError, match=expected):
            checks.validate_machine(config)
    else:
        checks.validate_machine(config)
        assert needed == expected.split()


def test_each_process_needs_a_gpu_of_its_own(monkeypatch):
    """More processes than GPUs on a machine; upstream's error is CUDA's."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    for local, device in ((2, "cuda"), (3, "cpu")):
        monkeypatch.setattr(checks, "device_type", device)
        monkeypatch.setenv("LOCAL_RANK", str(local))
        checks.validate_machine(JobConfig())
    monkeypatch.setattr(checks, "device_type", "cuda")
    with pytest.raises(InputError, match="process 3 .* torch sees 3; give --nproc 3"):
        checks.validate_machine(JobConfig())


def test_a_resume_needs_no_initial_checkpoint(tmp_path):
    """Upstream looks at initial_load_path only while the run has no checkpoint folder of its own."""
    toml = f"job = {{dump_folder = '{tmp_path}', experiment = 'x'}}; checkpoint.initial_load_path = 'gone'"
    with pytest.raises(InputError, match="initial_load_path"):
        validate(toml)
    (tmp_path / "x" / "checkpoint").mkdir(parents=True)
    validate(toml)
