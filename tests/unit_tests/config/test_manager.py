"""Reading and checking a config: what is taken from where, and one sentence for each mistake."""

import ast
import inspect
import itertools
from dataclasses import fields
from pathlib import Path

import pytest

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config import job_config
from torchtitan.models.dit_tts.config.checks import (
    accumulation_steps,
    data_parallel_degree,
    validate_config,
)
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import (
    load_config,
    run_folder_path,
    upstream_view,
)
from torchtitan.models.dit_tts.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
FLAVORS = list(model_flavors())


def refused(call, *words: str) -> None:
    """`call` ends with one sentence that holds all the words: key or file, found, allowed."""
    with pytest.raises(InputError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence and ". " not in sentence
    for word in words:
        assert word in sentence, sentence


def load(tmp_path: Path, toml: str | bytes, *arguments: str) -> JobConfig:
    file = tmp_path / "given.toml"
    file.write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    return load_config(["--job.config_file", str(file), *arguments])


def validate(*arguments: str, world_size: int = 1) -> None:
    validate_config(load_config(list(arguments)), world_size, FLAVORS)


# Where a value comes from


def test_precedence(tmp_path):
    toml = "[training]\nsteps = 5\nlocal_batch_size = 6\n[compile]\nenable = true\n"
    config = load(tmp_path, toml, "--training.steps=7", "--compile.no-enable")
    default = JobConfig()
    assert config.training.steps == 7
    assert config.training.local_batch_size == 6 != default.training.local_batch_size
    assert config.training.max_norm == default.training.max_norm
    assert not config.compile.enable and load(tmp_path, toml).compile.enable


@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.local_batch_size=3"],
        ["--training.local-batch-size=3"],
        ["--training.local_batch_size", "3"],
    ],
)
def test_spellings_of_a_flag(tmp_path, arguments):
    assert load(tmp_path, "", *arguments).training.local_batch_size == 3
    toml = tmp_path / "given.toml"
    for config_file in (["--job.config_file", str(toml)], [f"--job.config-file={toml}"]):
        toml.write_text("[data]\nseed = 4\n")
        config = load_config([*arguments, *config_file])
        assert (config.training.local_batch_size, config.data.seed) == (3, 4)


def test_our_defaults_differ_from_upstreams_where_they_must():
    config = load_config([])
    assert config == load_config([])
    assert config.model.name == "dit_tts"
    assert config.checkpoint.last_save_model_only is False  # else the last could not be resumed


def test_the_runs_folder(tmp_path, monkeypatch):
    config = load(tmp_path, "[job]\ndump_folder = '~/runs'\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder_path(config) == tmp_path / "runs" / "given"
    named = load(tmp_path, "", "--job.experiment=other", "--job.dump_folder=d")
    assert run_folder_path(named) == Path("d/other")


def test_upstream_sees_the_runs_folder_and_a_whole_local_batch(tmp_path):
    named = load(tmp_path, "", "--job.experiment=other", "--job.dump_folder=d")
    named.training.global_batch_size = 12
    inside = upstream_view(named, run_folder_path(named), dp_degree=4)
    assert inside.job.dump_folder == "d/other" and named.job.dump_folder == "d"
    assert (inside.training.local_batch_size, named.training.local_batch_size) == (3, 0)
    named.training.local_batch_size = 2
    assert upstream_view(named, Path("x"), dp_degree=4).training.local_batch_size == 2


@pytest.mark.parametrize(
    "path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_configs_are_valid(path):
    """On at least one of these numbers of processes."""
    config = load_config(["--job.config_file", str(path)])
    refusals = {}
    for world_size in (1, 8, 64):
        try:
            validate_config(config, world_size, FLAVORS)
        except InputError as error:
            refusals[world_size] = str(error)
    assert len(refusals) < 3, refusals
    model_flavors()[config.model.flavor].update_from_config(config, download=False)


def test_every_field_of_ours_says_what_it_is():
    """A sentence under each field of our sections, as upstream has it."""
    module = ast.parse(inspect.getsource(job_config))
    sections = [node for node in module.body if isinstance(node, ast.ClassDef)]
    assert {"Data", "Objective", "EMA", "JobConfig"} <= {section.name for section in sections}
    for section in sections:
        if section.name == "JobConfig":
            continue
        statements = [*section.body, None]
        for field, after in itertools.pairwise(statements):
            if not isinstance(field, ast.AnnAssign):
                continue
            sentence = after.value.value if isinstance(after, ast.Expr) else None
            where = f"{section.name}.{field.target.id}"
            assert isinstance(sentence, str) and len(sentence) > 10, where
            assert sentence[0].isupper() or not sentence[0].isalpha(), where


def test_every_section_is_a_field_of_the_config():
    kinds = {f.type for f in fields(JobConfig)}
    ours = [c for c in vars(job_config).values() if inspect.isclass(c)]
    ours = {c for c in ours if c.__module__ == job_config.__name__}
    assert ours - {JobConfig} <= kinds


# Mistakes in the file


@pytest.mark.parametrize(
    "toml, words",
    [
        ("[training]\nstep = 1", ["[training] step", "did you mean steps?"]),
        ("[data]\nzzz = 1", ["[data] zzz", "allowed are", "max_frames", "seed"]),
        ("[trainin]\nsteps = 1", ["section [trainin]", "did you mean training?"]),
        ("steps = 1", ["[steps]", "allowed are", "training"]),
        ("data = 3", ["[data]", "3", "must be a section"]),
        ("[[data]]\nseed = 3", ["[data]", "must be a section"]),
        ("[training]\nsteps = 'many'", ["[training] steps", "'many'", "int"]),
        ("[training]\nsteps = 1.5", ["[training] steps", "1.5", "int"]),
        ("[training]\nsteps = true", ["[training] steps", "True", "int"]),
        ("[optimizer]\nlr = '1e-3'", ["[optimizer] lr", "'1e-3'", "float"]),
        ("[ema]\nenable = 1", ["[ema] enable", "1", "bool"]),
        ("[data]\npath = ['a', 1]", ["[data] path", "['a', 1]", "str"]),
        ("[data]\non_too_long = 'keep'", ["[data] on_too_long", "'keep'", "'drop', 'error'"]),
        ("[data]\nbucket_frames = 64", ["[data] bucket_frames", "64", "list[int]"]),
        ("[data]\nbucket_frames = [64, 'x']", ["[data] bucket_frames", "'x'", "list[int]"]),
        ("[checkpoint]\ninitial_load_path = 3", ["[checkpoint] initial_load_path", "3", "str"]),
        ("[training\nsteps = 1", ["not valid TOML", "line 1"]),
        ("[data]\nseed = 1\nseed = 2", ["not valid TOML"]),
        (b"[data]\npath = '\xff'", ["not valid TOML", "utf-8"]),
    ],
)
def test_mistakes_in_the_file(tmp_path, toml, words):
    refused(lambda: load(tmp_path, toml), "given.toml", *words)


def test_a_missing_file(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        refused(
            lambda: load_config([f"--job.config_file={path}"]), "job.config_file", str(path), "give"
        )


def test_whole_numbers_are_floats_too(tmp_path):
    config = load(tmp_path, "[optimizer]\nlr = 1\n[data]\nbucket_frames = []\n")
    assert config.optimizer.lr == 1 and config.data.bucket_frames == []


# Mistakes on the command line


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--training.step=1"], ["--training.step", "did you mean steps?"]),
        (["--trainin.steps=1"], ["--trainin.steps", "did you mean training?"]),
        (["--data.zzz", "1"], ["--data.zzz", "allowed are", "max_frames"]),
        (["--data.seed.more=1"], ["--data.seed.more"]),
        (["--data=1"], ["--data"]),
        (["--data.no-seed"], ["--data.no-seed"]),
        (["--training.steps=many"], ["--training.steps", "'many'", "int"]),
        (["--training.steps"], ["--training.steps", "Missing value"]),
        (["--data.on_too_long=keep"], ["--data.on_too_long", "'keep'", "'drop'", "'error'"]),
        (["--data.bucket_frames", "64", "x"], ["--data.bucket-frames", "'x'"]),
        (["stray"], ["stray"]),
        (["--job.config_file"], ["--job.config-file", "Missing value"]),
    ],
)
def test_mistakes_on_the_command_line(arguments, words, capfd):
    refused(lambda: load_config(arguments), *words)
    assert capfd.readouterr() == ("", "")  # the sentence is all that is said


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "--data.max-frames INT" in said and "Longest utterance, in latent frames" in said


# Settings that cannot work


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments, world_size, words",
    [
        (["--model.flavor=2B"], 1, ["[model] flavor", "'2B'", "debug, 800M, 3B, 8B"]),
        (["--model.name=llama3"], 1, ["[model] name", "'llama3'", "'dit_tts'"]),
        (["--encoder.model=t5"], 1, ["[encoder] model", "'t5'", "'bytes'"]),
        (["--job.experiment=a/b"], 1, ["[job] experiment", "'a/b'", "'/'"]),
        (["--job.experiment=.."], 1, ["[job] experiment", "'..'"]),
        (
            ["--parallelism.data_parallel_replicate_degree=2"],
            1,
            ["data_parallel_replicate_degree = 2", "1 processes"],
        ),
        (
            [
                "--parallelism.data_parallel_replicate_degree=2",
                "--parallelism.data_parallel_shard_degree=3",
            ],
            8,
            ["data_parallel_replicate_degree 2", "data_parallel_shard_degree 3", "6", "8"],
        ),
        (
            ["--parallelism.data_parallel_shard_degree=0"],
            1,
            ["data_parallel_shard_degree = 0", "-1 or at least 1"],
        ),
        (
            ["--parallelism.data_parallel_replicate_degree=-1"],
            2,
            ["data_parallel_replicate_degree = -1", "at least 1"],
        ),
        (
            ["--parallelism.tensor_parallel_degree=2"],
            2,
            ["tensor_parallel_degree = 2", "set it to 1"],
        ),
        (
            ["--training.local_batch_size=4", "--training.global_batch_size=12"],
            2,
            ["global_batch_size = 12", "local_batch_size 4 x 2 ", "= 8"],
        ),
        (
            ["--training.local_batch_size=4", "--training.global_batch_size=2"],
            1,
            ["global_batch_size = 2", "4"],
        ),
        (["--training.global_batch_size=0"], 1, ["global_batch_size = 0"]),
        (["--training.local_batch_size=-1"], 1, ["local_batch_size = -1", "at least 1"]),
        (
            ["--training.local_batch_size=0", "--training.global_batch_size=9"],
            2,
            ["global_batch_size = 9", "2 data-parallel ranks"],
        ),
        (
            ["--training.local_batch_size=8", "--data.batch_multiple=6"],
            4,
            ["[data] batch_multiple = 6", "4 data-parallel ranks x 1", "multiple of 4"],
        ),
        (
            [
                "--training.local_batch_size=2",
                "--training.global_batch_size=24",
                "--data.batch_multiple=8",
            ],
            4,
            ["[data] batch_multiple = 8", "x 3 accumulation steps", "12"],
        ),
        (["--training.steps=0"], 1, ["[training] steps = 0", "greater than 0"]),
        (["--data.batch_multiple=0"], 1, ["[data] batch_multiple = 0", "greater than 0"]),
        (["--training.max_norm=nan"], 1, ["[training] max_norm = nan", "greater than 0"]),
        (["--optimizer.lr=-1"], 1, ["[optimizer] lr = -1", "not be negative"]),
        (["--objective.text_dropout=1.5"], 1, ["[objective] text_dropout = 1.5", "0 and 1"]),
        (["--ema.decay=-0.1"], 1, ["[ema] decay = -0.1", "0 and 1"]),
        (["--objective.logit_std=0"], 1, ["[objective] logit_std = 0", "greater than 0"]),
        (["--checkpoint.keep_latest_k=1"], 1, ["[checkpoint] keep_latest_k = 1", "at least 2"]),
        (["--checkpoint.folder=."], 1, ["[checkpoint] folder = '.'", "without '/'"]),
        (["--checkpoint.folder=/data"], 1, ["[checkpoint] folder = '/data'", "without '/'"]),
        (
            ["--checkpoint.initial_load_path=no/where"],
            1,
            ["[checkpoint] initial_load_path", "'no/where'", "not a folder"],
        ),
        (
            ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"],
            2,
            ["[checkpoint] create_seed_checkpoint", "2 processes", "needs 1"],
        ),
        (
            ["--checkpoint.no-enable", "--checkpoint.create_seed_checkpoint"],
            1,
            ["[checkpoint] create_seed_checkpoint", "enable = false", "enable = true"],
        ),
        (["--validation.enable"], 1, ["[validation] enable = true", "false"]),
        (
            [
                "--activation_checkpoint.mode=selective",
                "--activation_checkpoint.selective_ac_option=x",
            ],
            1,
            ["selective_ac_option = 'x'", "'op' or N"],
        ),
        (
            ["--activation_checkpoint.mode=memory_budget"],
            1,
            ["mode = 'memory_budget'", "[compile] enable = true"],
        ),
    ],
)
def test_settings_that_cannot_work(arguments, world_size, words):
    refused(lambda: validate(*arguments, world_size=world_size), *words)


@pytest.mark.parametrize(
    "replicate, shard, world_size, expected",
    [(1, -1, 1, 1), (1, -1, 8, 8), (2, -1, 8, 8), (4, 2, 8, 8), (8, 1, 8, 8), (1, 6, 6, 6)],
)
def test_degrees_that_multiply(replicate, shard, world_size, expected):
    config = load_config(
        [
            f"--parallelism.data_parallel_replicate_degree={replicate}",
            f"--parallelism.data_parallel_shard_degree={shard}",
        ]
    )
    assert data_parallel_degree(config, world_size) == expected


@pytest.mark.parametrize(
    "local, total, degree, expected", [(4, -1, 3, 1), (4, 12, 3, 1), (4, 48, 3, 4), (1, 7, 7, 1)]
)
def test_accumulation(local, total, degree, expected):
    config = load_config(
        [f"--training.local_batch_size={local}", f"--training.global_batch_size={total}"]
    )
    assert accumulation_steps(config, degree) == expected


def test_a_resume_needs_no_initial_checkpoint(tmp_path):
    """Upstream looks at initial_load_path only while the run has no checkpoint folder of its own."""
    arguments = [
        f"--job.dump_folder={tmp_path}",
        "--job.experiment=x",
        "--checkpoint.initial_load_path=gone",
    ]
    refused(lambda: validate(*arguments), "initial_load_path")
    (tmp_path / "x" / "checkpoint").mkdir(parents=True)
    validate(*arguments)


@pytest.mark.long
def test_paths_of_data_on_the_command_line_and_in_toml(tmp_path, monkeypatch):
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
    toml = tmp_path / "x.toml"
    toml.write_text('[data]\npath = ["a", "http://h/b.tar"]\nweights = [1.0, 2.5]\n')
    data = load_config(["--job.config_file", str(toml), "--data.weights", "3", "1"]).data
    assert data.path == [f"{tmp_path}/a", "http://h/b.tar"] and data.weights == [3.0, 1.0]
    toml.write_text("[data]\npath = [1]\n")
    with pytest.raises(InputError, match="path = .* has the wrong type"):
        load_config(["--job.config_file", str(toml)])
