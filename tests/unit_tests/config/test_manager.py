"""Reading a config: what comes from where, what follows from it, and one message for each mistake."""

import copy
import re
from pathlib import Path

import pytest

from torchtitan.models.dit_tts.config.help import print_help
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import (
    config_from_dict,
    load_config,
    resolve,
    run_folder_path,
    upstream_view,
)
from torchtitan.models.dit_tts.errors import InputError


def load(tmp_path: Path, toml: str | bytes, *arguments: str) -> JobConfig:
    file = tmp_path / "given.toml"
    file.write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    return load_config(["--job.config_file", str(file), *arguments])


# Where a value comes from


def test_precedence(tmp_path):
    toml = "optimizer.lr = 1\ncompile.enable = true\n[training]\nsteps = 5\nlocal_batch_size = 6\n"
    for flag in ("--training.steps=7", "--training.steps 7"):
        config = load(tmp_path, toml, *flag.split(), "--compile.no-enable")
        assert config.training.steps == 7 and config.optimizer.lr == 1  # an integer for a float
        assert config.training.local_batch_size == 6
        assert config.training.max_norm == JobConfig().training.max_norm
        assert not config.compile.enable
    with_blank = load_config(
        ["--training.local-batch-size=3", f"--job.config-file={tmp_path}/given.toml"]
    )
    assert with_blank.training.local_batch_size == 3 and with_blank.compile.enable
    for off in ("--compile.enable false", "--compile.enable=False", "--compile.no-enable"):
        assert not load(tmp_path, toml, *off.split()).compile.enable
    for on in ("--compile.enable", "--compile.enable true"):
        assert load(tmp_path, "", *on.split()).compile.enable
    assert load_config(["--model.flavor", "batch_size"]).model.flavor == "batch_size"  # an old key


@pytest.mark.long
def test_paths_of_data(tmp_path, monkeypatch):
    """One path, or several with commas between them; braces keep theirs; URLs stay as they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd,name").mkdir()
    for given, wanted in (
        ("a", f"{tmp_path}/a"),
        ("a,/b", [f"{tmp_path}/a", "/b"]),
        ("a-{1,2}.tar,s3://x/{0..3}.tar", [f"{tmp_path}/a-{{1,2}}.tar", "s3://x/{0..3}.tar"]),
        ("odd,name", f"{tmp_path}/odd,name"),
    ):
        assert load_config([f"--data.path={given}"]).data.path == wanted
    local = load_config(["--encoder.model=odd,name", "--sampling.codec=odd,name"])
    assert local.encoder.model == local.sampling.codec == f"{tmp_path}/odd,name"
    toml = '[data]\npath = ["a", "http://h/b.tar"]\nweights = [1.0, 2.5]\n'
    data = load(tmp_path, toml, "--data.weights", "3", "1").data
    assert data.path == [f"{tmp_path}/a", "http://h/b.tar"] and data.weights == [3.0, 1.0]
    assert load(tmp_path, toml, "--data.weights=3,1").data.weights == [3.0, 1.0]


def test_lists_and_what_may_be_missing(tmp_path):
    toml = "data.conditioning = ['speaker']\nlr_scheduler.decay_ratio = 0.5\n"
    options = "--lr_scheduler.decay_ratio None --debug.seed=5 --training.max_norm inf"
    lists = "--ema.decays 0.9,0.5 0.1 --data.conditioning= --compile.components encoders loss"
    config = load(tmp_path, toml, *options.split(), *lists.split())
    assert (config.lr_scheduler.decay_ratio, config.debug.seed) == (None, 5)
    assert config.training.max_norm == float("inf")
    assert (config.ema.decays, config.data.conditioning) == ([0.9, 0.5, 0.1], [])
    assert config.compile.components == ["encoders", "loss"]


# What follows from it


def test_upstream_sees_the_run_folder_and_a_positive_local_batch(tmp_path, monkeypatch):
    config = load(tmp_path, "[job]\ndump_folder = '~/d'\n[training]\nglobal_batch_size = 12\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    named = load(tmp_path, "", "--job.experiment=other", "--job.dump_folder=d")
    assert run_folder_path(named) == Path("d/other")
    before = copy.deepcopy(config)
    view = upstream_view(config, run_folder_path(config), dp_degree=4)
    assert (view.job.dump_folder, view.training.local_batch_size) == (f"{tmp_path}/d/given", 3)
    view.training.steps = view.encoder.vocab_size = 77  # by the loader and the tokenizer
    assert config == before
    config.training.local_batch_size = 2
    assert upstream_view(config, Path("x"), dp_degree=3).training.local_batch_size == 2
    config.training.local_batch_size, config.training.max_local_batch_size = 0, 3
    assert upstream_view(config, Path("x"), dp_degree=2).training.local_batch_size == 3


def test_a_resolved_config_stays_as_it_is():
    arguments = ["--data.path=a", "--data.epochs=3", "--metrics.enable-wandb", "--data.audit"]
    arguments += ["--data.weights=2", "--data.balance_by=speaker"]
    arguments += ["--checkpoint.initial_load_path=x", "--checkpoint.create_seed_checkpoint"]
    config = load_config(["--benchmark.enable", *arguments])
    data, checkpoint = config.data, config.checkpoint
    assert not (data.weights or data.balance_by or data.audit)
    assert not (checkpoint.initial_load_path or checkpoint.create_seed_checkpoint)
    assert (config.data.path, config.data.epochs, config.checkpoint.enable) == ("", 0, False)
    assert not config.metrics.enable_wandb
    assert resolve(config) == config
    known = resolve(config, vocab_size=300, steps=40)
    assert (known.encoder.vocab_size, known.training.steps) == (300, 40)
    assert (config.encoder.vocab_size, config.training.steps) == (0, JobConfig().training.steps)


def test_help_has_each_key_that_is_used(capsys):
    with pytest.raises(SystemExit):
        print_help()
    shown = capsys.readouterr().out
    for name, hidden in (
        *[("lora.rank", False), ("quantize.linear.float8.emulate", False), ("debug.seed", False)],
        *[("data.max-frames", False), ("model.converters", False), ("model.name", True)],
        *[("metrics.save-for-all-ranks", True), ("quantize.linear.mx.recipe-name", True)],
        *[("fault-tolerance.enable", True), ("parallelism.pipeline-parallel-schedule", True)],
    ):
        assert (f"--{name}" in shown) != hidden, name


# Mistakes

IN_THE_FILE = """
[training]; step = 1 | given.toml: unknown [training] step: did you mean steps?
[data]; zzz = 1 | unknown [data] zzz: allowed are path
data = 3 | data = 3 must be a section, [data]
[training]; steps = 'many' | [training] steps = 'many', but it must be a whole number
[training]; steps = true | [training] steps = True, but it must be a whole number
[optimizer]; lr = '1e-3' | [optimizer] lr = '1e-3', but it must be a number
[data]; on_error = 'keep' | [data] on_error = 'keep', but it must be one of 'raise', 'skip'
[data]; bucket_frames = [64, 'x'] | [64, 'x'], but it must be a list, each element a whole number
[training; steps = 1 | not valid TOML
[training]; compile = true | unknown [training] compile: use [compile] enable
[float8]; enable_float8_linear = true | section [float8]: use [quantize.linear.float8], and [model] converters
parallelism = 'fsdp' | must be a section, [parallelism]: use [parallelism] data_
"""
ON_THE_COMMAND_LINE = """
--training.compile 8 | unknown option --training.compile: use [compile] enable
--parallelism fsdp | unknown option --parallelism: use [parallelism] data_parallel_shard_degree
--training.step 8 | unknown option --training.step: did you mean --training.steps?
--data.no-path | unknown option --data.no-path: did you mean --data.path?
--data.zzzz=1 | unknown option --data.zzzz: titan-tts train --help-config lists the options
--training.steps=ten | --training.steps = 'ten', but it must be a whole number
--training.steps | --training.steps has no value, but it must be a whole number
--ema.decays 0.9,b | --ema.decays = '0.9,b', but it must be a list, each element a number
--ema.enable maybe | --ema.enable = 'maybe', but it must be true or false
stray | 'stray' has no option --section.key before it
"""


def rows(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("toml, sentence", rows(IN_THE_FILE))
def test_mistakes_in_the_file(tmp_path, toml, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        load(tmp_path, toml.replace("; ", "\n"))


@pytest.mark.parametrize("arguments, sentence", rows(ON_THE_COMMAND_LINE))
def test_mistakes_on_the_command_line(arguments, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        load_config(arguments.split())


def test_all_keys_of_a_trainer_of_this_kind_have_a_pointer(tmp_path):
    keys = """scale parallelism framework compile tensor_parallel_size remat use_te_attn duration_seconds encoder_model
    frozen_encoder fused_optimizer batch_size_per_gpu max_latent_length max_text_length max_speaker_length t5_hidden_dim"""
    for key in keys.split():
        with pytest.raises(InputError, match=r"(use|leave it out:) \[\w+\]"):
            load(tmp_path, f"{key} = 1")


def test_keys_of_earlier_versions():
    """Those that changed nothing, or not what is trained, are read; others say what to do."""
    old = {"batch_ramp": [], "batch_ramp_steps": 8}
    encoder = {"model": "a/b", "cache_features": True, "cache_dtype": "float16"}
    found = config_from_dict({"training": old, "encoder": encoder}, "config.toml")
    assert found.encoder.model == "a/b"
    with pytest.raises(InputError, match="training. batch_ramp: leave it out: every step"):
        config_from_dict({"training": old | {"batch_ramp": [4, 2]}}, "config.toml")


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match="job.config_file: cannot read"):
            load_config(["--job.config_file", str(path)])
    with pytest.raises(InputError, match="not valid TOML.*utf-8"):
        load(tmp_path, b"[data]\npath = '\xff'")


# Held-out samples


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> Path:
    """What titan-tts prepare writes; and the working directory is beside it."""
    for name in ("train", "heldout"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "000000.tar").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.mark.long
@pytest.mark.parametrize("path", ["data/train/", "./data/../data/train", "file://"])
def test_held_out_shards_beside_the_data_are_found(prepared, path):
    path = path if path != "file://" else f"file://{prepared}/train"
    config = load_config([f"--data.path={path}"])
    assert config.validation.path == str(prepared / "heldout") and config.validation.enable
    assert resolve(config) == config  # also once more, as from its config.toml
    for off in ("--validation.no-enable", "--benchmark.enable"):
        config = load_config([f"--data.path={path}", off, "--samples.freq=2"])
        assert not config.validation.enable
        assert config.samples.freq == (0 if "benchmark" in off else 2)
    (prepared / "heldout/000000.tar").rename(prepared / "heldout/notes.txt")
    assert not load_config([f"--data.path={path}"]).validation.enable


@pytest.mark.parametrize(
    "path, given, found",
    [
        ("data/train,data/train", "", ""),  # whose held-out samples are those of which?
        ("data/train/*.tar", "", ""),
        ("data/heldout", "", ""),
        ("s3://bucket/train", "", ""),
        ("", "", ""),
        ("data/train", "other/dev", "{}/other/dev"),
        ("data/train", "s3://bucket/dev", "s3://bucket/dev"),
        ("data/train", "a,https://host/b", ["{}/a", "https://host/b"]),
        ("data/train,x", "data/heldout", "{}/data/heldout"),
    ],
)
def test_held_out_samples_that_are_given_or_none(prepared, path, given, found):
    config = load_config([f"--data.path={path}", f"--validation.path={given}"])
    wanted = [found] if isinstance(found, str) else found
    wanted = [each.format(prepared.parent) for each in wanted]
    assert config.validation.path == (wanted[0] if isinstance(found, str) else wanted)
    assert config.validation.enable == bool(given)
